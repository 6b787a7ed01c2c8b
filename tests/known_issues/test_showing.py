"""Tests for shows.toml: results of scripts, and the version ranges that follow from them."""

from dataclasses import replace

import pytest

from equivcheck.oracle.known_issues.known import KnownIssue, all_known_issues
from equivcheck.oracle.known_issues.showing import Showing, Shows, read_table, showing, version_range, written_table

ISSUES = {issue.id: issue for issue in all_known_issues()}
WRONG, CRASH = ISSUES["fsdp1_unties"], ISSUES["adafactor_of_nothing"]
YES, NO = Showing(shows=Shows.SHOWS), Showing(shows=Shows.DOES_NOT)


@pytest.mark.parametrize(
    ("issue", "code", "printed", "found"),
    [
        (WRONG, 1, "max difference 0.02\n", "shows"),
        (WRONG, 1, "max difference nan\n", "shows"),
        (WRONG, 0, "max difference 1.7e-15\n", "does not"),
        (WRONG, 1, "max difference 0.0\nTraceback ...\nImportError: no FSDP\n", "cannot run: ImportError: no FSDP"),
        (CRASH, 1, "ZeroDivisionError: float division by zero\n", "shows"),
        (CRASH, 0, "", "does not"),
        (CRASH, 1, "max difference 1.0\nrank 0 did not finish within 90 s\n", "cannot run: rank 0 did not finish within 90 s"),
        (CRASH, 1, "", "cannot run: exit code 1"),
        (
            CRASH,
            1,
            "RuntimeError: Connection closed by peer\ntorch.a.MetaError: no gradient\n",
            "cannot run: torch.a.MetaError: no gradient",
        ),
    ],
)
def test_a_script_shows_its_issue_by_exit_code_and_evidence(issue: KnownIssue, code: int, printed: str, found: str) -> None:
    """A script that fails in another way cannot run. The reason is the error of the first rank that raised."""
    assert str(showing(issue.error, code, printed)) == found


@pytest.mark.parametrize(
    ("version", "is_in"), [("2.9.1+cpu", False), ("2.11.0", True), ("2.15.0.dev20260801", False), ("2.16", True)]
)
def test_what_was_seen_agrees_with_a_range_that_has_exactly_the_versions_that_show(version: str, is_in: bool) -> None:
    """A nightly build counts as its release. Versions on which the script cannot run are not in the range."""
    is_listed = replace(WRONG, torch=">=2.11,!=2.15.*").is_in(version)
    cannot = Showing(shows=Shows.CANNOT_RUN, reason="ImportError")
    assert [each.agrees(is_in_range=is_listed) for each in (YES, NO, cannot)] == [is_in, not is_in, not is_in]


@pytest.mark.parametrize(
    ("shows", "expected"),
    [
        ("yyyy", ">=2.9"),
        ("nyyy", ">=2.10"),
        ("yynn", ">=2.9,<2.11"),
        ("nycn", ">=2.10,<2.11"),
        ("ynny", ">=2.9,!=2.10.*,!=2.11.*"),
        ("nnnn", "<0"),
        ("", ""),
    ],
)
def test_version_ranges_follow_from_measured_versions(shows: str, expected: str) -> None:
    """A range begins and ends at minor versions. It is open above if the newest version shows the issue."""
    results = {"y": YES, "n": NO, "c": Showing(shows=Shows.CANNOT_RUN, reason="ImportError")}
    versions = ("2.9.1", "2.10.0", "2.11.0", "2.12.1")
    assert version_range({version: results[show] for version, show in zip(versions, shows, strict=False)}) == expected


def test_a_table_is_read_as_it_was_written() -> None:
    """The table has one line for each issue, sorted by name, with versions from oldest to newest."""
    cannot = Showing(shows=Shows.CANNOT_RUN, reason='ImportError: "x": no\\y')
    table = {"b": {"2.10.0": YES, "2.9.1": NO}, "a": {"2.9.1": cannot}}
    text = written_table(table)
    assert read_table(text) == table
    assert text.splitlines()[-1] == 'b = { "2.9.1" = "does not", "2.10.0" = "shows" }'
    assert text.splitlines()[-2].startswith("a = ")
