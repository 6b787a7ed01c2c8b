"""In each recipe, correct layouts pass, and each planted bug is found."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from equivcheck import Matrix, Outcome
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from equivcheck.user.recipe import defined_in
from examples.recipes import EXAMPLES, PLANTED, RECIPES

SLOW = (
    "expert gradients summed",
    "router gradient in parts",
    "bias in shares",
    "bias on every rank",
    "positions counted anew",
    "local_map says nothing",
)
"""Parts of layout names that only nightly runs check, because their recipe has another bug."""
VERSIONS = {
    ("edges", "to_local"): (">=2.12", "DTensor refuses earlier to view rows that are cut as one dim with another"),
    ("edges", "local_map"): (">=2.12", "DTensor refuses earlier to view rows that are cut as one dim with another"),
    ("llama", "pipeline"): (">=2.10", "stages greet each other in another element type than they expect"),
}
"""Supported torch versions with the reason, by the start of a layout's name."""


def _marks(recipe: str, name: str) -> Iterator[pytest.MarkDecorator]:
    if name.startswith(SLOW):
        yield pytest.mark.slow
    for (of, begin), needs in VERSIONS.items():
        if recipe == of and name.startswith(begin):
            yield pytest.mark.torch(*needs)


LAYOUTS = [
    pytest.param(recipe, name, marks=[*_marks(recipe, name)])
    for recipe in RECIPES
    for name in defined_in(EXAMPLES / f"{recipe}.py", Matrix).names
]


def recipe(name: str) -> Matrix:
    """Load a recipe as the command does."""
    return defined_in(EXAMPLES / f"{name}.py", Matrix)


def test_every_recipe_has_a_bug_of_public_record() -> None:
    """The bug's number is in the layout's name and in the file's docstring."""
    assert set(RECIPES) == set(PLANTED)
    for name, layouts in PLANTED.items():
        docstring = EXAMPLES.joinpath(f"{name}.py").read_text("utf-8").split('"""')[1]
        assert all(re.findall(r"#\d+", layout)[0] in docstring for layout in layouts)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: value.replace(" ", "_"))
def test_a_layout_is_as_the_recipe_says(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EQUIVALENT with one device's gradient norm, or DIVERGED at the planted bug. No cause is searched."""
    monkeypatch.setattr("equivcheck.user.diagnosing.diagnosis_of", lambda hint, *_: UserDiagnosis(hint=hint))
    row = recipe(name).run(layout)[layout]
    assert row.is_as_expected, row.details
    wrong = PLANTED[name].get(layout)
    assert row.expected is (Outcome.DIVERGED if wrong else Outcome.EQUIVALENT)
    assert row.first_difference == (wrong or "")
    assert row.measures is not None
    assert wrong or row.measures.norm_ratio == pytest.approx(1.0, rel=1e-9), "replicas and parts count once"
