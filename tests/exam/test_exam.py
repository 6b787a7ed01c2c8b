"""Silent bugs of public record are found, each at the place where it first changes a number."""

from __future__ import annotations

import pytest

from equivcheck import Outcome
from equivcheck.system.torch_version import is_torch_in
from exam.item import Item, Listed, Planted
from exam.items import ITEMS
from exam.score import score
from examples.pages import ROOT
from examples.recipes import PLANTED
from support.verdicts import first_divergence

RUN = [item for item in ITEMS if item.by is not None and not isinstance(item.by, Listed)]
LISTED = [item for item in ITEMS if isinstance(item.by, Listed)]


@pytest.mark.parametrize("item", RUN, ids=lambda item: item.name.replace(" ", "_"))
def test_a_bug_is_found_and_nothing_without_it(item: Item) -> None:
    """The training that has it diverges there, and the same training without it is equivalent."""
    if not is_torch_in(item.torch):
        pytest.skip(f"runs on torch {item.torch}")
    assert item.by is not None
    assert not isinstance(item.by, Listed)
    program = item.by if isinstance(item.by, Planted) else item.by()

    right, wrong = program.right(), program.wrong()

    assert right.outcome is Outcome.EQUIVALENT, right.describe()
    first = first_divergence(wrong)
    assert f"step {first.step} {first.phase.value} {first.tensor}" == item.first


@pytest.mark.parametrize("item", LISTED, ids=lambda item: item.name.replace(" ", "_"))
def test_a_bug_is_found_by_a_recipe(item: Item) -> None:
    """The tests of recipes run it: it is one of the layouts that must diverge, and there."""
    assert isinstance(item.by, Listed)
    assert PLANTED[item.by.recipe][item.by.layout] == item.first


def test_an_item_says_what_is_wrong_or_why_it_was_not_tried() -> None:
    """And each is a bug of its own."""
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        assert item.about and item.first if item.by else item.note, item.name


def test_the_docs_have_the_score() -> None:
    """The page is written from the items."""
    page = ROOT.joinpath("docs/explanation/exam.md").read_text("utf-8")
    assert page.endswith(f"\n{score()}"), f"docs/explanation/exam.md has to end with:\n{score()}"
