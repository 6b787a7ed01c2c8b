"""Tests for entries in known.toml."""

import pytest

from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.oracle.known_issues import predicates as known_predicates
from equivcheck.oracle.known_issues.known import InvalidKnownIssue, all_known_issues, read_issues
from equivcheck.oracle.known_issues.predicates import NEEDS, SHOWS
from equivcheck.oracle.known_issues.workarounds import WORKAROUNDS

LINKS = ("https://github.com/pytorch/pytorch/", "https://docs.pytorch.org/docs/stable/")
MOST_CHARACTERS = 100


def test_issues_are_well_formed() -> None:
    """Ids are distinct, layouts exist, links lead to torch, titles are short, and each predicate is used."""
    issues = all_known_issues()
    assert len({issue.id for issue in issues}) == len(issues)
    assert {tag for issue in issues for tag in issue.layouts} <= set(layout_kinds())
    assert all(issue.link.startswith(LINKS) for issue in issues if issue.link)
    assert all(len(issue.title) <= MOST_CHARACTERS and not issue.title.endswith(".") for issue in issues)
    assert {name for issue in issues for name in issue.needs} == set(NEEDS)
    assert {name for issue in issues for name in issue.shows} == set(SHOWS)
    assert {issue.without for issue in issues} - {""} == set(WORKAROUNDS)
    assert all(function.__doc__ for function in (*NEEDS.values(), *SHOWS.values())), known_predicates.__name__


CRASH = {"id": "x", "title": "y", "kind": "crash", "layouts": ["ddp"], "needs": ["inf_norm"], "error": "z"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"needs": ["inf_nrom"]},
            "known issue 'x' is not valid: needs has the unknown name 'inf_nrom'. Expected activations_cut_unevenly, ",
        ),
        (
            {"shows": ["inf_norm"]},
            "known issue 'x' is not valid: shows has the unknown name 'inf_norm'. Expected before_a_compiled_hook, ",
        ),
        (
            {"without": "inf_norm"},
            "known issue 'x' is not valid: without has the unknown name 'inf_norm'. Expected all_labels_count, ",
        ),
        ({"kind": "crush"}, "known issue 'x' is not valid: kind is 'crush'. Expected wrong_numbers, crash, "),
        (
            {"kind": "wrong_numbers"},
            "known issue 'x' is not valid: the evidence does not fit the kind wrong_numbers. Expected phases and",
        ),
        ({"error": ""}, "known issue 'x' is not valid: the evidence does not fit the kind crash. Expected "),
        ({"error": "("}, "known issue 'x' is not valid: missing ), unterminated subpattern at position 0. Expected "),
        ({"torch": ">=2.9"}, "known issue 'x' is not valid: missing keys [], unknown keys ['torch']. Expected "),
        ({"layout": "ddp"}, "known issue 'x' is not valid: missing keys [], unknown keys ['layout']. Expected "),
    ],
)
def test_an_entry_that_is_not_well_formed_is_refused_in_one_line(changes: dict[str, object], text: str) -> None:
    """The error names the entry, the mistake, and the allowed values."""
    entry = "\n".join(f"{key} = {value!r}" for key, value in (CRASH | changes).items())
    assert [issue.id for issue in read_issues("[[issue]]\n" + "\n".join(f"{key} = {value!r}" for key, value in CRASH.items()))]
    with pytest.raises(InvalidKnownIssue) as caught:
        read_issues("[[issue]]\n" + entry)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
