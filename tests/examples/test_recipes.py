"""The recipes of `examples/`: each layout is right, and each planted bug is found where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from equivcheck import Matrix, Outcome
from equivcheck.user.matrix.recipe import matrix_of
from examples.recipes import EXAMPLES, PLANTED, RECIPES

SLOW = (
    "expert gradients summed",
    "router gradient in parts",
    "bias in shares",
    "bias on every rank",
    "positions counted anew",
    "local_map says nothing",
)
"""Names of layouts, in part, whose recipes have another bug that every run looks for."""
VERSIONS = {
    ("edges", "to_local"): (">=2.12", "DTensor refuses earlier to view rows that are cut as one dim with another"),
    ("edges", "local_map"): (">=2.12", "DTensor refuses earlier to view rows that are cut as one dim with another"),
    ("llama", "pipeline"): (">=2.10", "stages greet each other in another element type than they expect"),
}
"""Of layouts by the beginnings of their names, on which torch they run, and why not on others."""


def _marks(recipe: str, name: str) -> Iterator[pytest.MarkDecorator]:
    if name.startswith(SLOW):
        yield pytest.mark.slow
    for (of, begin), needs in VERSIONS.items():
        if recipe == of and name.startswith(begin):
            yield pytest.mark.torch(*needs)


LAYOUTS = [
    pytest.param(recipe, name, marks=[*_marks(recipe, name)])
    for recipe in RECIPES
    for name in matrix_of(EXAMPLES / f"{recipe}.py").names
]


def recipe(name: str) -> Matrix:
    """As the command reads it."""
    return matrix_of(EXAMPLES / f"{name}.py")


def test_every_recipe_has_a_bug_of_public_record() -> None:
    """Its number is in the layout's name and in the docstring of the file."""
    assert set(RECIPES) == set(PLANTED)
    for name, layouts in PLANTED.items():
        docstring = EXAMPLES.joinpath(f"{name}.py").read_text("utf-8").split('"""')[1]
        assert all(re.findall(r"#\d+", layout)[0] in docstring for layout in layouts)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: value.replace(" ", "_"))
def test_a_layout_is_as_the_recipe_says(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EQUIVALENT, with the gradient norm of one device, or DIVERGED at the place of its bug. Nobody looks for the cause."""
    monkeypatch.setattr("equivcheck.user.judging.with_cause", lambda verdict, *_: verdict)
    row = recipe(name).run(layout)[layout]
    assert row.is_as_expected, row.details
    wrong = PLANTED[name].get(layout)
    assert row.expected is (Outcome.DIVERGED if wrong else Outcome.EQUIVALENT)
    assert row.first_difference == (wrong or "")
    assert row.measures is not None
    assert wrong or row.measures.norm_ratio == pytest.approx(1.0, rel=1e-9), "replicas and parts count once"
