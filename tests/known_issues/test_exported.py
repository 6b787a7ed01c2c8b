"""Tests for exported scripts that show known issues: up to date, and they show the issue."""

from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.export.forked import run_forked
from equivcheck.export.script import script_of
from equivcheck.oracle.known_issues.known import all_known_issues, known_issues
from equivcheck.scenario.file_format.codec import from_json

EXPORTED = Path(__file__).parent / "exported"
SCENARIOS = sorted(EXPORTED.glob("*.json"))
SEEN_ON = "2.13.0"
HERE = [path for path in SCENARIOS if path.stem in {issue.id for issue in known_issues()}]
"""Scenarios whose issue the installed torch has."""


def test_each_script_has_a_scenario() -> None:
    """Each issue with an exported script also has its scenario."""
    assert [path.stem for path in SCENARIOS] == [path.stem for path in sorted(EXPORTED.glob("*.py"))]
    assert {path.stem for path in SCENARIOS} <= {issue.id for issue in all_known_issues()}


@pytest.mark.parametrize("scenario", HERE, ids=lambda path: path.stem)
def test_the_script_is_what_is_written_today(scenario: Path) -> None:
    """Exporting the scenario gives the same text, except for numbers, because these depend on the processor."""
    script = scenario.with_suffix(".py")

    verdict = check(from_json(scenario.read_text("utf-8")))

    assert verdict.known == scenario.stem
    written = script_of(verdict.scenario, verdict=verdict, name=script.name, seen_on=SEEN_ON)
    assert without_numbers(written) == without_numbers(script.read_text("utf-8"))


def without_numbers(text: str) -> list[str]:
    """Paragraphs of a script without the one that gives the error."""
    return [paragraph for paragraph in text.split("\n\n") if "tolerance)" not in " ".join(paragraph.split())]


@pytest.mark.parametrize("scenario", HERE, ids=lambda path: path.stem)
def test_the_script_shows_the_issue(scenario: Path, tmp_path: Path) -> None:
    """The script needs torch only, exits with 1, and prints the difference."""
    script = scenario.with_suffix(".py")
    text = script.read_text("utf-8")
    assert "equivcheck" not in text
    ranks = int(text.partition("--nproc-per-node ")[2].split()[0])

    code, printed = run_forked(script, ranks, tmp_path)

    assert code == 1, printed
    assert "max difference" in printed
