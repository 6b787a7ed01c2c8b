"""The page of a finding: what its ranks left is drawn, and what is marked is what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.report.finding_page.call_lanes import MAX_CALLS, MAX_COLUMNS, lane_blocks
from equivcheck.report.finding_page.mesh import LEFT, draw_mesh
from equivcheck.report.finding_page.page import PageContext, write_scenario_page
from equivcheck.report.finding_page.second_run import SecondRun, run_isolated
from equivcheck.scenario import Axis, Layer, Mesh, Model
from equivcheck.worlds.call import Call
from unit.campaign import fakes
from unit.report.finding_pages import on_a_grid, page_of, under_ddp
from unit.report.html_page import LARGEST, HtmlPage, require_sound

pytestmark = pytest.mark.usefixtures("workers_are_forked")

HOSTILE = "<script>alert('&')</script>\x1b[31m"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the page goes."""
    return tmp_path / "page.html"


def read(file: Path) -> HtmlPage:
    """The page that was written, which must be sound."""
    page = HtmlPage(file.read_text("utf-8"))
    require_sound(page)
    return page


def test_what_each_rank_holds_and_what_is_wrong_is_drawn(file: Path) -> None:
    """A gradient of 8 x 6 in four parts over two axes: each rank has two rows of it, and unreduced all are wrong."""
    verdict = page_of(file, on_a_grid(steps=1), "reduce_scatter_missing", why=True)
    page = read(file)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.sentence in page.text
    assert "holds 12 of 48, all wrong" in page.said("tensors")
    first = [each for each in page.root.iter("svg") if each.attrib["class"] == "cells"][:4]
    held = [path.attrib["d"] for each in first for path in each.findall("path[@class='held']")]
    wrong = [path.attrib["d"] for each in first for path in each.findall("path[@class='off']")]
    assert held == wrong == [f"M0 {y}h6v1h-6zM0 {y + 1}h6v1h-6z" for y in (0, 4, 2, 6)]
    assert ["layers.1.linear.weight", "4 x 8", "sharded on dim 0", "sharded on dim 1", "2 x 4 on every rank"] in page.rows("mesh")


def test_losses_and_errors_are_told_step_by_step(file: Path) -> None:
    """With what is beyond tolerance marked: the first loss is right, those after a wrong update are not."""
    page_of(file, under_ddp(steps=2), "gradients_summed")
    page = read(file)
    heading, *rows = page.rows("steps")
    assert heading[:5] == ["step", "loss in the single-device run", "loss on ranks", "loss error", "gradient error"]
    assert rows[0][1] == rows[0][2]
    assert rows[1][1] != rows[1][2]
    assert [float(row[4]) > 1 for row in rows] == [True, True]
    assert len(page.root.findall(".//section[@id='steps']//svg")) == 2


def test_what_is_right_is_drawn_as_right(file: Path) -> None:
    """No rank is marked, nothing differs, and calls are as expected."""
    page_of(file, under_ddp())
    page = read(file)
    assert "✓ equivalent" in page.text
    assert "No tensor differs." in page.said("tensors")
    assert "Calls and bytes of each step are as expected." in page.said("calls")
    assert "wrong" not in page.said("mesh")


def test_ranks_part_where_the_calls_do(file: Path) -> None:
    """Ranks that hang have lanes up to there, and what not all of a group have issued is filled; nothing is compared."""
    verdict = page_of(file, under_ddp(), "rank_skips_reduction")
    page = read(file)
    assert verdict.outcome is Outcome.HUNG
    assert "Your ranks issue different calls at the filled boxes" in page.said("calls")
    alone = [each for each in page.root.iter("g") if each.attrib.get("class", "").endswith("alone")]
    assert len(alone) == 1
    assert "waiting" in page.said("mesh")
    assert not page.root.findall(".//section[@id='tensors']")


def test_calls_that_are_not_expected_are_named(file: Path) -> None:
    """With what was expected beside what was issued."""
    page_of(file, on_a_grid(steps=1), "reduce_scatter_missing")
    assert ["0", "reduce_scatter.sum over dp in compute", "0", "1 call, 384 bytes", "no call"] in read(file).rows("calls")


def test_a_page_of_many_ranks_and_wide_layers_stays_small(file: Path) -> None:
    """Cells are blocks of elements, and what is beyond the room is counted."""
    small = under_ddp(ranks=8)
    wide = replace(small, training=replace(small.training, model=Model(features=32, layers=(Layer(width=32),) * 4)))
    page_of(file, wide, "gradients_summed", script="x" * 70_000)
    page = read(file)
    assert "a cell is 2 x 2 elements" in page.said("tensors")


def test_lanes_have_room_for_so_many_calls() -> None:
    """Of a step that issues more, and of steps that differ, the rest is counted."""
    shapes = [((number,),) for number in range(3 * MAX_COLUMNS)]
    calls = [
        [
            Call(op="all_reduce.sum", ranks=tuple(range(8)), index=at, shapes=shape, dtype="float64", num_bytes=8, step=step)
            for step in range(4)
            for at, shape in enumerate(shapes[step:])
        ]
        for _ in range(8)
    ]
    mesh = under_ddp(ranks=8).layout.mesh
    blocks = lane_blocks(calls, mesh)
    assert sum(len(block.calls) for block in blocks) == MAX_CALLS
    assert sum(len(block.calls) + block.left_out for block in blocks) == sum(map(len, calls))


def test_a_finding_is_drawn_from_a_process_of_its_own(file: Path) -> None:
    """What that leaves comes back; a scenario that cannot show what its verdict says has a note."""
    verdict = fakes.diverged(under_ddp())
    again = run_isolated(verdict, deadline=60.0)
    assert again.moments
    write_scenario_page(file, verdict, again, PageContext())
    assert "the drawings show a second run, in which no value differs" in read(file).text


def test_text_of_unknown_origin_is_only_text(file: Path) -> None:
    """In reasons, scripts and notes; a page without any run is one as well."""
    verdict = Verdict(outcome=Outcome.CRASHED, scenario=under_ddp(), world="gloo", reason=HOSTILE)
    write_scenario_page(file, verdict, SecondRun(note=HOSTILE), PageContext(script=HOSTILE, commands=(HOSTILE,)))
    page = read(file)
    assert page.text.count("<script>") >= 4
    assert not re.search("\x1b", page.source)
    assert len(page.source) < LARGEST / 10


def test_the_names_of_a_mesh_are_in_its_drawing() -> None:
    """The axes of panels and across are named in one line, which may be longer than the boxes are wide."""
    axes = (Axis(name="dp_replicate", size=1), Axis(name="dp_shard", size=2), Axis(name="tp", size=1))
    drawn = draw_mesh(Mesh(axes=axes), (), None)
    assert (drawn.panels, drawn.across) == ("dp_replicate 1", "tp 1")
    assert drawn.width >= LEFT + 6 * len("dp_replicate 1, then tp 1")
