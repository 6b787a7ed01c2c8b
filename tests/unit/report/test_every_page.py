"""Pages of commands: sound as all are, with the numbers that the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck.mutants.registry import mutants
from unit.report.every_page import CAUGHT_AFTER, PAGES, write_coverage, write_selftest
from unit.report.html_page import HtmlPage, require_sound

DASH = "\N{EN DASH}"
"""Where there is no number."""
OF_COMMANDS = ("matrix", "selftest", "coverage", "dry_run", "bench", "versions")
"""Those that no other module of tests is about."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the page goes."""
    return tmp_path / "page.html"


def read(file: Path) -> HtmlPage:
    """The page that was written."""
    return HtmlPage(file.read_text("utf-8"))


@pytest.mark.parametrize("name", OF_COMMANDS)
def test_a_page_is_one_small_file_that_can_be_read_aloud(file: Path, name: str) -> None:
    """Whatever it is about; and there is something in each of its sections."""
    PAGES[name](file)
    page = read(file)
    require_sound(page)
    sections = page.root.findall(".//section")
    assert sections
    assert all(len(section) > 1 for section in sections)


def test_a_selftest_is_mutants_by_layouts(file: Path) -> None:
    """A layout where a mutant was missed is marked, one where none was drawn has a dot, one where it cannot be is empty."""
    found = write_selftest(file)
    page = read(file)
    never, missed, caught, *_ = mutants().values()
    rows = {row[0]: row[1:] for row in page.rows("layouts")}
    assert set(rows[never.name]) <= {"·", ""}
    assert rows[missed.name].count("0/1") == rows[caught.name].count("0/1") + 1 == 1
    assert rows[caught.name].count("1/1") == len(caught.layouts[:3])
    assert "✗ 1 mutant not caught" in page.text
    catches = {row[0]: row[1:] for row in page.rows("catches")}
    assert catches[caught.name][2] == str(CAUGHT_AFTER)
    assert len(catches) == len(found.rows) + 1


def test_coverage_is_a_map_of_what_is_missing(file: Path) -> None:
    """With the sums that the command prints, and the features that lack most."""
    measured = write_coverage(file)
    page = read(file)
    assert f"{measured.reach.drawn.count:,}" in page.text
    heading, *rows = page.rows("pairs")
    assert [row[0] for row in rows] == heading[1:]
    assert len(page.rows("features")) == 1 + 40
    assert "And " in page.said("features")


def test_a_dry_run_is_bytes_by_rank_and_calls_by_step(file: Path) -> None:
    """As many as the arithmetic says, and problems first."""
    PAGES["dry_run"](file)
    page = read(file)
    assert ["rank 0 (dp 0, tp 0)", "192 bytes", "192 bytes", "400 bytes", "784 bytes"] in page.rows("bytes")
    assert ["compute", "reduce_scatter.sum", "dp", "1", "384 bytes"] in page.rows("calls")
    assert "Step 1 and each that follows" in page.said("calls")
    assert "✗ not as it should be: 1 difference" in page.text
    assert "rank 0 holds [3, 6]" in page.said("bytes")


def test_versions_mark_what_is_not_on_file(file: Path) -> None:
    """Beside what each script did, in more than colour."""
    PAGES["versions"](file)
    page = read(file)
    rows = {row[0]: row[1:] for row in page.rows("scripts")}
    assert rows["tensor_parallel_unfreezes"] == [">=2.9,<2.11", "○ !", "○"]
    assert "1 diverged: because" in page.said("wrong")
    assert "sim 0/1, gloo 0/1" in page.said("corpus")


def test_a_bench_says_what_was_not_measured(file: Path) -> None:
    """With ratios where there are any."""
    PAGES["bench"](file)
    page = read(file)
    assert "✓ a check in sim is 548 times faster than on new processes" in page.text
    assert ["new processes", DASH] in page.rows("worlds")
    assert ["fsdp2 on 4", DASH, "4 x", DASH] in page.rows("ratios")
