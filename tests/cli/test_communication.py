"""``check --comm`` shows communication as a table, as lanes and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivcheck.cli import main
from equivcheck.report.communication_text import lane_cells
from equivcheck.report.lanes import placed_steps
from equivcheck.scenario import DDP, SPMD, Axis, Data, Distribution, Layer, Layout, Mesh, Model, Parallelism, Scenario, Training
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.worlds.call import Call
from equivcheck.worlds.trace.stage import Stage

MESH = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))


def call(op: str, ranks: tuple[int, ...], *, peer: int | None = None, step: int = 0) -> Call:
    """A call in a step."""
    where = {"stage": Stage.COMPUTE, "step": step}
    return Call(op=op, ranks=ranks, index=0, shapes=((1,),), dtype="float64", num_bytes=8, peer=peer, **where)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A scenario that reduces nine numbers in each of two steps."""
    return written(tmp_path, DDP())


def written(folder: Path, parallelism: Parallelism) -> Path:
    """A file with a scenario."""
    training = Training(model=Model(features=2, layers=(Layer(width=3),)), data=Data(microbatches=(4,)), steps=2)
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(parallelism,))
    path = folder / "scenario.json"
    path.write_text(to_json(Scenario(training=training, layout=layout)))
    return path


def test_communication_is_shown_beside_what_is_predicted(file: Path) -> None:
    """The table compares calls and bytes in each step with the prediction. Each rank has a lane."""
    lines = CliRunner().invoke(main, ["check", str(file), "--comm"]).stdout.splitlines()

    assert "ranks 0, 1:" in lines
    assert ["0", "compute", "all_reduce.sum", "dp", "1", "72", "the", "same"] in [line.split() for line in lines]
    assert ["1", "compute", "broadcast", "dp", "2", "16", "the", "same"] in [line.split() for line in lines]
    after = lines.index("step 1")
    assert [line.split() for line in lines[after + 1 : after + 3]] == [["rank", str(rank), "Ba", "Ba", "Ra"] for rank in (0, 1)]


def test_without_being_asked_nothing_of_it_is_shown(file: Path) -> None:
    """If `--comm` is not given, neither text nor JSON mentions calls."""
    assert "all_reduce" not in CliRunner().invoke(main, ["check", str(file)]).stdout
    found = json.loads(CliRunner().invoke(main, ["check", str(file), "--json"]).stdout)
    assert "communication" not in found
    assert "calls" not in found


def test_json_has_every_call(file: Path) -> None:
    """JSON has each rank's calls in order, and the predicted totals."""
    found = json.loads(CliRunner().invoke(main, ["check", str(file), "--comm", "--json"]).stdout)["communication"]

    assert [len(rank) for rank in found["calls"]] == [len(found["calls"][0])] * 2
    last = found["calls"][1][-1]
    assert (last["op"], last["ranks"], last["num_bytes"], last["stage"], last["step"]) == (
        "all_reduce.sum",
        [0, 1],
        72,
        "compute",
        1,
    )
    reduced = [entry for entry in found["expected"][1] if entry["op"] == "all_reduce.sum"]
    assert [(entry["step"], entry["num_calls"], entry["num_bytes"]) for entry in reduced] == [(0, 1, 72), (1, 1, 72)]


@pytest.mark.torch(">=2.11", "earlier versions have no mse_loss of DTensors")
@pytest.mark.parametrize(("world", "reason"), [("sim", "propagation"), ("gloo", "does not see calls")])
def test_why_nothing_is_compared_is_said(tmp_path: Path, world: str, reason: str) -> None:
    """If calls are not predicted or not recorded, the output gives the reason."""
    path = written(tmp_path, SPMD(distribution=Distribution.FULLY_SHARD))
    assert reason in CliRunner().invoke(main, ["check", str(path), "--comm", "--world", world]).stdout


def test_calls_of_a_group_share_a_column() -> None:
    """A call stands in the column of its last member; other members are idle before."""
    rows, columns, whole = ((0, 1), (2, 3)), ((0, 2), (1, 3)), (0, 1, 2, 3)
    calls = [
        [call("all_gather", rows[0]), call("all_reduce.sum", whole)],
        [call("all_gather", rows[0]), call("reduce_scatter.sum", columns[1]), call("all_reduce.sum", whole)],
        [call("all_reduce.sum", whole)],
        [call("reduce_scatter.sum", columns[1]), call("all_reduce.sum", whole)],
    ]

    ((_, placed),) = placed_steps(calls, MESH)

    assert [" ".join(rank) for rank in lane_cells(placed, 4)] == ["Ga  . Rb", "Ga Sc Rb", " .  . Rb", " . Sc Rb"]


def test_messages_and_calls_that_others_lack_are_shown() -> None:
    """A call that only some members make has its own column, and lanes may end early."""
    calls = [[call("send", (0, 1), peer=1), call("all_reduce.sum", (0, 1))], [call("recv", (0, 1), peer=0)], [], []]

    ((_, placed),) = placed_steps(calls, MESH)

    assert [" ".join(rank) for rank in lane_cells(placed, 4)[:2]] == [">a Ra", "<a  ."]


def test_steps_that_are_alike_are_told_once() -> None:
    """Three steps with two equal ones give two blocks."""
    calls = [
        [call("barrier", (0, 1)), call("all_gather", (0, 1), step=1), call("all_gather", (0, 1), step=2)] if rank < 2 else []
        for rank in range(4)
    ]
    assert [steps for steps, _ in placed_steps(calls, MESH)] == [[0], [1, 2]]
