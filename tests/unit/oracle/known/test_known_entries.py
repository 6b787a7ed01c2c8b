"""Tests for entries in known.toml."""

import pytest

from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.oracle.known_issues import predicates as known_predicates
from equivcheck.oracle.known_issues.known import InvalidKnownIssue, issues_on_file, read_issues
from equivcheck.oracle.known_issues.predicates import NEEDS, SHOWS
from equivcheck.oracle.known_issues.workarounds import WITHOUT

LINKS = ("https://github.com/pytorch/pytorch/", "https://docs.pytorch.org/docs/stable/")
MOST_CHARACTERS = 100


def test_issues_are_well_formed() -> None:
    """Ids are distinct, layouts exist, links lead to torch, titles are short, and each predicate is used."""
    issues = issues_on_file()
    assert len({issue.id for issue in issues}) == len(issues)
    assert {tag for issue in issues for tag in issue.layouts} <= set(layout_kinds())
    assert all(issue.link.startswith(LINKS) for issue in issues if issue.link)
    assert all(len(issue.title) <= MOST_CHARACTERS and not issue.title.endswith(".") for issue in issues)
    assert {name for issue in issues for name in issue.needs} == set(NEEDS)
    assert {name for issue in issues for name in issue.shows} == set(SHOWS)
    assert {issue.without for issue in issues} - {""} == set(WITHOUT)
    assert all(function.__doc__ for function in (*NEEDS.values(), *SHOWS.values())), known_predicates.__name__


CRASH = {"id": "x", "title": "y", "kind": "crash", "layouts": ["ddp"], "needs": ["inf_norm"], "error": "z"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"needs": ["inf_nrom"]}, "known issue 'x': needs names 'inf_nrom'; allowed: activations_cut_unevenly, "),
        ({"shows": ["inf_norm"]}, "known issue 'x': shows names 'inf_norm'; allowed: before_a_compiled_hook, "),
        (
            {"without": "inf_norm"},
            "known issue 'x': without names 'inf_norm'; allowed: all_labels_count, all_trained, ",
        ),
        ({"kind": "crush"}, "known issue 'x': kind is 'crush'; allowed: wrong_numbers, crash, "),
        (
            {"kind": "wrong_numbers"},
            "known issue 'x': of kind wrong_numbers has the wrong evidence; allowed: phases and differences, ",
        ),
        ({"error": ""}, "known issue 'x': of kind crash has the wrong evidence; allowed: "),
        ({"error": "("}, "known issue 'x': missing ), unterminated subpattern at position 0; allowed: "),
        ({"torch": ">=2.9"}, "known issue 'x': lacks [], has the unknown ['torch']; allowed: "),
        ({"layout": "ddp"}, "known issue 'x': lacks [], has the unknown ['layout']; allowed: "),
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
