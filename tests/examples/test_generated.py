"""Generated documentation pages are complete."""

from __future__ import annotations

import gc
import re
import sys
import tomllib
from pathlib import Path

import pytest

from examples.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from generator import pages, sources
from generator.issue_text import issue_text

import equivcheck.scenario
from equivcheck.cli import main
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.mutants.registry import mutants
from equivcheck.oracle.known_issues.known import IssueKind, all_known_issues
from equivcheck.oracle.known_issues.showing import Shows, measured_results
from equivcheck.programs.check import check_program
from equivcheck.programs.run.known.difference import KnownDifference
from equivcheck.programs.run.known.on_file import ON_FILE


@pytest.mark.parametrize("name", mutants())
def test_each_mutant_has_an_entry(name: str) -> None:
    """The entry has the mutant's description."""
    (entry,) = [entry for entry in re.split(r"^(?=`)", pages.mutants(), flags=re.MULTILINE) if entry.startswith(f"`{name}`\n")]
    assert plain(mutants()[name].wrong) in plain(entry)


@pytest.mark.parametrize("name", equivcheck.scenario.__all__)
def test_each_noun_is_documented(name: str) -> None:
    """Each class is documented once."""
    assert pages.scenario().count(f".. autoclass:: equivcheck.scenario.{name}\n") == 1


@pytest.mark.parametrize("name", main.commands)
def test_each_command_has_its_help(name: str) -> None:
    """The section has the command's options."""
    section = pages.cli().partition(f"## `{name}`\n")[2].partition("\n## ")[0]
    assert f"Usage: equivcheck {name} " in section
    assert "  --json " in section or name == "record", "it prints what the recorded command prints"


def test_each_known_issue_has_a_section() -> None:
    """The section has the script, and a scenario if one can show the issue."""
    page = pages.known_issues()
    sections = {section.split("\n")[0].replace("\\", ""): section for section in page.split("\n## ")[1:]}
    assert list(sections) == [issue.id for issue in all_known_issues()]
    for issue in all_known_issues():
        assert f"`{issue.id}.py`" in sections[issue.id]
        line = next(
            line for line in page.splitlines() if line.endswith(" |") and f"(#issue-{issue.id.replace('_', '-')})" in line
        )
        assert (" | silent | " in line) == (issue.kind is IssueKind.WRONG_NUMBERS)
        assert ("Scenario(" in sections[issue.id]) == bool(issue.layouts)
        row = re.search(r"^\| shows \|.*$", sections[issue.id], re.MULTILINE)[0]
        cells = {"yes": Shows.SHOWS, "no": Shows.DOES_NOT, "-": Shows.CANNOT_RUN}
        shown = [cells[cell] for cell in row.removesuffix(" |").split(" | ")[1:]]
        assert shown == [found.shows for found in measured_results()[issue.id].values()]


def test_each_limit_is_listed() -> None:
    """All limits in memory are on the page, also if no parallelism owns them."""
    page = plain(pages.limits())
    gc.unfreeze()  # a session of tests hides from the collector what it has imported
    limits = [found for found in gc.get_objects() if type(found) in (Limit, LayoutLimit)]
    ours = [limit for limit in limits if limit.applies.__module__.startswith("equivcheck.")]
    assert len(ours) > 50
    assert not [limit.reason for limit in ours if plain(pages.sentence(limit)) not in page]


def test_a_limit_is_a_sentence() -> None:
    """It keeps the API, the situation, the exception and the consequence of the reason."""
    limit = LayoutLimit(reason="A: b is not supported without c: d", applies=bool, repair=lambda layout: layout, torch=">=2.13")
    assert pages.sentence(limit) == "A: b is not supported without c, because d (torch 2.13 and newer)."


def test_limits_are_listed_by_layout() -> None:
    """Each parallelism's limits are in its section."""
    for tag, limits in sources.limits_by_layout().items():
        part = pages.limits().partition(f"## {f'`{tag}`' if tag else 'Any layout'}\n")[2].partition("\n## ")[0]
        assert part.count("\n- ") == len(limits)


def plain(text: str) -> str:
    """Text without Markdown escapes."""
    return " ".join(text.replace("\\", "").replace("`", "").replace("*", "").split())


def test_each_known_difference_has_a_section_and_the_text_of_an_issue() -> None:
    """The section has results for each version, and a script."""
    page = pages.dtensor_differences()
    sections = {section.split("\n")[0].replace("\\", ""): section for section in page.split("\n## ")[1:]}
    assert list(sections) == [known.id for known in ON_FILE]
    for known in ON_FILE:
        assert "# [DTensor]" in sections[known.id]
        assert "def main():" in sections[known.id]
        assert f"(#difference-{known.id.replace('_', '-')})" in page
        row = re.search(r"^\| result \|.*$", sections[known.id], re.MULTILINE)[0]
        cells = row.removesuffix(" |").split(" | ")[1:]
        assert cells == list(known.shows.values())


def test_each_module_with_private_api_has_a_section() -> None:
    """With its versions, and with names in modules for private API."""
    package = ROOT / "equivcheck"
    marked = {
        path for path in package.rglob("*.py") if re.search(r"private torch API", path.read_text("utf-8")[:1500], re.IGNORECASE)
    }
    private = set(package.rglob("torch_private.py"))
    assert len(private) >= 4
    page = pages.private_api()
    for path in marked | private:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        section = page.partition(f"## `{module}`\n")[2].partition("\n## ")[0]
        assert re.search(r"\*\*Tested with\*\*: torch 2\.\d+", section), module
        assert path not in private or re.search(r"\*\*Names\*\*: `torch\.", section), module


@pytest.mark.parametrize("path", sorted(pages.RESULTS.glob("*.toml")), ids=lambda path: path.stem)
def test_each_measured_table_is_on_the_page(path: Path) -> None:
    """Each row has a cell for each column, and all cells are in the table's section."""
    found = tomllib.loads(path.read_text("utf-8"))
    section = pages.results().partition(f"## {found['title']}\n")[2].partition("\n## ")[0]
    lines = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}
    assert lines[0] == found["columns"]
    assert lines[2:] == [[str(cell) for cell in row] for row in found["rows"]]


def test_the_text_of_an_issue_says_what_where_and_how_to_see_it() -> None:
    """Expected and actual result, versions, and a Python script without equivcheck."""
    known = next(each for each in ON_FILE if each.id == "dtensor_writes_to_slices")
    program = sources.smallest_programs()[known.id]
    text = issue_text(known, program, check_program(program))
    assert text.startswith("# [DTensor] a slice of a sharded dim is a copy")
    assert "2.13.0" in text
    assert "expected 0.5, found 0.25" in text
    script = text.partition("```python\n")[2].removesuffix("```\n")
    compile(script, "repro.py", "exec")
    assert "equivcheck" not in text


@pytest.mark.parametrize("known", ON_FILE, ids=lambda known: known.id)
def test_every_known_difference_has_an_issue_text(known: KnownDifference) -> None:
    """No program needs to run."""
    assert issue_text(known, sources.smallest_programs()[known.id]).count("```") == 2
