"""The page about two recorded runs: each table has the numbers of the comparison, readable without colour."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from equivcheck.cli import main
from unit.report.html_page import HtmlPage, require_sound
from unit.report.recordings import write_compared, write_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the page goes."""
    return tmp_path / "page.html"


def page_of(file: Path, fault: str = "", **arguments: object) -> HtmlPage:
    """A page, written and read again."""
    write_compared(file, fault, **arguments)  # type: ignore[arg-type]
    return HtmlPage(file.read_text("utf-8"))


def table(page: HtmlPage, section: str) -> dict[str, list[str]]:
    """Rows by heading."""
    return {row[0]: row[1:] for row in page.rows(section)}


@pytest.mark.parametrize("fault", ["", "gradient", "replica", "samples", "setting", "environment", "nan", "missing"])
def test_a_page_is_one_small_file_that_can_be_read_aloud(file: Path, fault: str) -> None:
    """For each outcome."""
    require_sound(page_of(file, fault))


def test_moments_by_steps_mark_the_first_difference(file: Path) -> None:
    """With its error relative to tolerance; what agrees, and what nobody recorded, is marked as well."""
    rows = table(page_of(file, "gradient"), "steps")
    assert rows["moment"] == ["step 0", "step 1", "step 2"]
    assert rows["start"] == ["✓ 0", "-", "-"]
    assert rows["gradient before clipping"] == ["✓ 0"] * 3
    assert rows["gradient first"][0] == "✓ 0"
    assert all(cell.startswith("✗ ") for cell in rows["gradient first"][1:])
    assert rows["output"] == ["-"] * 3


def test_steps_that_only_one_run_has_are_marked(file: Path) -> None:
    """With the run that has them."""
    rows = table(page_of(file, steps=(4, 3)), "steps")
    assert rows["gradient"] == ["✓ 0", "✓ 0", "✓ 0", "½ A"]


def test_tensors_are_in_the_order_of_the_model(file: Path) -> None:
    """At the first divergent step."""
    page = page_of(file, "gradient")
    assert "Tensors at step 1" in page.said("tensors")
    rows = table(page, "tensors")
    assert list(rows) == ["tensor", "up.weight", "up.bias first", "down.<weight>"]
    moments = ["gradient before clipping", "gradient", "parameter"]
    wrong = dict(zip(rows["tensor"], rows["up.bias first"], strict=True))
    assert [wrong[moment][0] for moment in moments] == ["✓", "✗", "✓"]


@pytest.mark.parametrize(("fault", "moment", "mark"), [("missing", "gradient", "½ A"), ("nan", "parameter", "✗ nan")])
def test_tensors_that_cannot_have_an_error_are_marked_in_words(file: Path, fault: str, moment: str, mark: str) -> None:
    """In both tables."""
    page = page_of(file, fault)
    tensors, steps = table(page, "tensors"), table(page, "steps")
    assert dict(zip(tensors["tensor"], tensors["up.bias first"], strict=True))[moment] == mark
    assert steps[f"{moment} first"][1] == mark


def test_replicas_that_disagree_have_a_column_for_each_rank(file: Path) -> None:
    """And their distance to the first of them."""
    page = page_of(file, "replica")
    (heading, first, *_) = page.rows("replicas")
    assert heading == ["tensor", "rank 0", "rank 1"]
    assert first[:2] == ["step 1 up.bias", "✓ 0"]
    assert first[2].startswith("✗ ")
    assert "ranks_disagree" not in page.text


def test_samples_are_counted_for_each_rank_and_step(file: Path) -> None:
    """With the places of samples that only one run has."""
    page = page_of(file, "samples")
    rows = page.rows("samples")
    assert rows[:2] == [["rank", "step 0", "step 1", "step 2"], ["rank 0", "✓ 8", "✓ 8", "✓ 8"]]
    assert rows[3:] == [
        ["rank 0", "✓ 4", "✗ 10, 2 only here", "✗ 10, 2 only here"],
        ["rank 1", "✓ 4", "✗ 9, 2 only here", "✗ 9, 2 only here"],
    ]
    assert "only in B: step 1, rank 0, microbatch 1, rows 0 to 1 (2 of 2 samples not in A)" in page.said("samples")


@pytest.mark.parametrize(("fault", "row"), [("setting", "step 1, group 0, lr"), ("environment", "OMP_NUM_THREADS")])
def test_settings_and_environments_that_differ_are_marked(file: Path, fault: str, row: str) -> None:
    """In text."""
    rows = table(page_of(file, fault), "settings")
    expected = {"setting": ["no", "0.01", "0.02"], "environment": ["no", "not set", "8"]}
    assert rows[row] == expected[fault]
    assert rows["torch"] == ["yes", "2.13.0", "2.13.0"]
    assert rows["step 0, group 0, optimizer"] == ["yes", "AdamW", "AdamW"]


def test_many_tensors_make_no_large_page(file: Path) -> None:
    """Rows that differ are kept, and the page says how many are left out."""
    page = page_of(file, "gradient", steps=(2, 2), num_tensors=410)
    require_sound(page)
    rows = table(page, "tensors")
    assert len(rows) == 401
    assert "up.bias first" in rows
    assert "10 more tensors not shown" in page.said("tensors")


@pytest.mark.parametrize(("since", "shown"), [(1, 0), (9, 4), (69, 10)])
def test_many_steps_make_no_large_page(file: Path, since: int, shown: int) -> None:
    """Steps around the first difference are kept, and the page says how many are left out."""
    page = page_of(file, "gradient", steps=(70, 70), since=since)
    require_sound(page)
    assert table(page, "steps")["moment"] == [f"step {step}" for step in range(shown, shown + 60)]
    assert "10 more steps not shown" in page.said("steps")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    """The usual output and the exit code stay."""
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", ranks=2, fault="gradient")
    file = tmp_path / "page.html"
    moved = write_run(tmp_path / "moved", moved=1)
    result = CliRunner().invoke(main, ["compare", str(one), str(other), "--moved", str(moved), "--html", str(file)])
    page = HtmlPage(file.read_text("utf-8"))
    assert result.output.startswith("DIVERGED: ")
    assert f"DIVERGED: {result.output.splitlines()[0].removeprefix('DIVERGED: ')}" in page.text
