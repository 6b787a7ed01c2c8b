"""Pages of the docs that are written from the code leave nothing out."""

from __future__ import annotations

import gc
import sys

import pytest

from examples.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from generator import pages, sources

from equivcheck.known_issues.known import known_issues
from equivcheck.layouts.kind import LayoutLimit, Limit
from equivcheck.mutants.registry import mutants


@pytest.mark.parametrize("name", mutants())
def test_each_mutant_has_a_row(name: str) -> None:
    """One that says what is wrong."""
    (row,) = [line for line in pages.mutants().splitlines() if line.startswith(f"| `{name}` |")]
    assert row.count(" | ") == 3
    assert plain(mutants()[name].wrong) in plain(row)


def test_each_known_issue_has_a_section() -> None:
    """With its script, and with a scenario if one reaches it."""
    page = pages.known_issues()
    sections = {section.split("\n")[0].replace("\\", ""): section for section in page.split("\n## ")[1:]}
    assert list(sections) == [issue.id for issue in known_issues()]
    for issue in known_issues():
        assert f"/{issue.id}.py\n" in sections[issue.id]
        assert ("Scenario(" in sections[issue.id]) == bool(issue.layouts)
        assert f"(#issue-{issue.id.replace('_', '-')})" in page


def test_each_limit_has_a_row() -> None:
    """Also one that no parallelism has for its own: what the interpreter holds is on the page."""
    page = plain(pages.limits())
    limits = [found for found in gc.get_objects() if type(found) in (Limit, LayoutLimit)]
    ours = [limit for limit in limits if limit.applies.__module__.startswith("equivcheck.")]
    assert len(ours) > 50
    assert not [limit.reason for limit in ours if plain(limit.reason) not in page]


def test_limits_are_listed_by_layout() -> None:
    """Each layout that has any has a part of the page."""
    for tag, limits in sources.limits_by_layout().items():
        part = pages.limits().partition(f"## {f'`{tag}`' if tag else 'Any layout'}\n")[2].partition("\n## ")[0]
        assert part.count("\n| ") == len(limits) + 2


def plain(text: str) -> str:
    """Text without what Markdown needs."""
    return " ".join(text.replace("\\", "").replace("`", "").split())
