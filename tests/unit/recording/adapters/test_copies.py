"""Optimizers that update copies of the parameters are compared under the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import equivcheck
from equivcheck import Outcome, TraceVerdict
from equivcheck.recording.trace import Entry, Moment
from equivcheck.recording.trace_file import read_trace
from equivcheck.recording.watch.record import record
from equivcheck.worlds.pool import ranks
from unit.recording.adapters.copies import KINDS, train, train_on_rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Recorded runs, each made once."""
    runs: dict[str, Path] = {}

    def run(*arguments: str, **options: object) -> Path:
        key = repr((arguments, options))
        if key not in runs:
            runs[key] = train(tmp_path_factory.mktemp("trace"), *arguments, **options)  # type: ignore[arg-type]
        return runs[key]

    return run


def entries(folder: Path, moment: Moment) -> list[Entry]:
    """Entries in step 0."""
    return [entry for entry in read_trace(folder)[0].steps[0].entries if entry.moment is moment]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_their_parameters_names(folder: Callable[..., Path], kind: str) -> None:
    """Norms with equal initial values are distinguished, and the verdict is the same as for separate copies."""
    gradients = entries(folder(kind), Moment.GRADIENT)
    assert sorted(entry.piece.name for entry in gradients) == sorted(
        entry.piece.name for entry in entries(folder(), Moment.GRADIENT)
    )
    assert {(entry.dtype, entry.model_dtype) for entry in gradients} == {("float32", "bfloat16")}
    verdict = equivcheck.compare(folder("one by one"), folder(kind), moved=[folder("one by one", moved=1)])
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert verdict.worst_error == 0.0


@pytest.mark.parametrize(
    ("fault", "moment", "tensor"),
    [("gradient", Moment.GRADIENT, "0.weight"), ("copy", Moment.UPDATE, "0.weight"), ("rate", Moment.UPDATE, "0.weight")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_copy_is_found(folder: Callable[..., Path], kind: str, fault: str, moment: Moment, tensor: str) -> None:
    """Because both runs have copies, changes below the model's precision show."""
    verdict = equivcheck.compare(folder("one by one"), folder(kind, fault), moved=[folder("one by one", moved=1)])
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert (verdict.differences[0].moment, verdict.differences[0].tensor) == (moment, tensor)


def test_parameters_that_do_not_follow_their_copies_are_found(folder: Callable[..., Path]) -> None:
    """In the next gradient: the copies themselves are right."""
    verdict = equivcheck.compare(folder("one by one"), folder("one by one", "not rounded"), moved=[folder("one by one", moved=1)])
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.differences[0].step, verdict.differences[0].moment) == (2, Moment.GRADIENT)


@pytest.mark.parametrize(("kind", "start"), [("sharded", ""), ("slices", "ramps")])
def test_copies_are_split_over_ranks(folder: Callable[..., Path], tmp_path: Path, kind: str, start: str) -> None:
    """Each rank has some elements; all together have all of them. Gradients that are not averaged are found."""
    for fault in ("", "sum"):
        ranks("gloo", 2).run(train_on_rank, tmp_path / (fault or "right"), kind, fault, start)
    one, moved = (folder("one by one", "", start, **options) for options in ({}, {"moved": 1}))
    verdict = equivcheck.compare(one, tmp_path / "right", moved=[moved])
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert "not compared" not in str(verdict)
    verdict = equivcheck.compare(one, tmp_path / "sum", moved=[moved])
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.differences[0].step, verdict.differences[0].moment) == (1, Moment.GRADIENT)


def both_ways(one: Path, other: Path) -> list[TraceVerdict]:
    """Verdicts in both orders."""
    return [equivcheck.compare(one, other), equivcheck.compare(other, one)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_compared_with_a_run_that_has_none(folder: Callable[..., Path], dtype: torch.dtype) -> None:
    """With the tolerance of the model's dtype, which a note says."""
    for verdict in both_ways(folder(dtype=dtype), folder("flat")):
        assert verdict.outcome is Outcome.EQUIVALENT, verdict
        assert "updates copies of its bfloat16 parameters, so rounding allows more" in "\n".join(verdict.notes)
    for verdict in both_ways(folder(dtype=dtype), folder("flat", "gradient")):
        assert verdict.outcome is not Outcome.EQUIVALENT


def test_a_moved_run_moves_copies_too(folder: Callable[..., Path]) -> None:
    """Otherwise the first update would undo the move."""
    moved, own = (entries(folder("one by one", **options), Moment.UPDATE) for options in ({"moved": 1}, {}))
    for one, other in zip(moved, own, strict=True):
        assert one.sketch.distance(other.sketch) > 0.0 or one.piece.name.endswith("bias")  # of norms, which are zero


def test_tensors_that_are_no_copies_end_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    model = nn.Linear(3, 2)
    other = nn.Parameter(torch.ones(5))
    with record(tmp_path):
        model(torch.ones(4, 3)).sum().backward()
        other.grad = torch.ones(5)
        torch.optim.SGD([other], lr=0.1).step()
        model(torch.ones(4, 3))
    assert "the optimizer's tensor with shape (5,) is not valid" in capsys.readouterr().err


def test_copies_that_only_their_order_distinguishes_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two norms have equal initial values. The optimizer has them in another order."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)).bfloat16()
    own = list(model.parameters())
    copies = [nn.Parameter(parameter.detach().float()) for parameter in own]
    optimizer = torch.optim.SGD(reversed(copies), lr=0.5)
    with record(tmp_path):
        model(torch.randn(4, 6).bfloat16()).square().sum().backward()
        for parameter, copy in zip(own, copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
        optimizer.step()
        for parameter, copy in zip(own, copies, strict=True):
            parameter.data.copy_(copy)
        model(torch.randn(4, 6).bfloat16())
    assert "several parameters have the same initial values" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_main_grad_is_the_gradient_if_there_is_no_other(tmp_path: Path) -> None:
    """Megatron accumulates there, in float32."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(tmp_path):
        model(torch.ones(4, 3).bfloat16()).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.main_grad, parameter.grad = parameter.grad.float(), None  # type: ignore[attr-defined]
        optimizer.step()
    found = entries(tmp_path, Moment.GRADIENT)
    assert [(entry.piece.name, entry.dtype, entry.model_dtype) for entry in found] == [
        ("weight", "float32", "bfloat16"),
        ("bias", "float32", "bfloat16"),
    ]
