"""Tests for scripts that were exported from scenarios of upstream issues: unedited, up to date, and they show the issue."""

from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.export.forked import launched
from equivcheck.export.script import script_of
from equivcheck.oracle.known_issues.known import issues_on_file, known_issues
from equivcheck.scenario.file_format.codec import from_json

EXPORTED = Path(__file__).parent / "exported"
SCENARIOS = sorted(EXPORTED.glob("*.json"))
SEEN_ON = "2.13.0"
HERE = [path for path in SCENARIOS if path.stem in {issue.id for issue in known_issues()}]
"""Those of the installed torch."""


def test_each_script_has_a_scenario() -> None:
    """Every file is one of a pair that is named after an issue on file."""
    assert [path.stem for path in SCENARIOS] == [path.stem for path in sorted(EXPORTED.glob("*.py"))]
    assert {path.stem for path in SCENARIOS} <= {issue.id for issue in issues_on_file()}


@pytest.mark.parametrize("scenario", HERE, ids=lambda path: path.stem)
def test_the_script_is_what_is_written_today(scenario: Path) -> None:
    """The very text comes out again for the torch that it names, but for the numbers, which depend on the processor."""
    script = scenario.with_suffix(".py")

    verdict = check(from_json(scenario.read_text("utf-8")))

    assert verdict.known == scenario.stem
    written = script_of(verdict.scenario, verdict=verdict, name=script.name, seen_on=SEEN_ON)
    assert without_numbers(written) == without_numbers(script.read_text("utf-8"))


def without_numbers(text: str) -> list[str]:
    """The paragraphs of a script but the one that says which element was seen to differ, and by how much."""
    return [paragraph for paragraph in text.split("\n\n") if "tolerance)" not in " ".join(paragraph.split())]


@pytest.mark.parametrize("scenario", HERE, ids=lambda path: path.stem)
def test_the_script_shows_the_issue(scenario: Path, tmp_path: Path) -> None:
    """It runs on torch alone, exits with 1, and prints where the difference is."""
    script = scenario.with_suffix(".py")
    text = script.read_text("utf-8")
    assert "equivcheck" not in text
    ranks = int(text.partition("--nproc-per-node ")[2].split()[0])

    code, printed = launched(script, ranks, tmp_path)

    assert code == 1, printed
    assert "max difference" in printed
