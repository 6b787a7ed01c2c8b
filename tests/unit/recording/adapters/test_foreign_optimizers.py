"""Optimizers and modules of other jobs in the process are neither read nor changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace
from unit.recording.adapters.copies import train


def norms() -> list[nn.Parameter]:
    """Parameters with the initial values of the recorded model's norms: ones and zeros."""
    return [nn.Parameter(make(24)) for _ in range(2) for make in (torch.ones, torch.zeros)]


@pytest.fixture
def foreign() -> Iterator[list[torch.optim.Optimizer]]:
    """Optimizers with plain tensors that equal the recorded parameters, and with DTensors of a world that is closed."""
    torch.manual_seed(0)
    equal = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 2))
    tensors = [equal.bfloat16().float().parameters(), norms(), [torch.cat([each.flatten() for each in norms()])]]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    tensors += [sharded.parameters(), [sharded[1].weight.detach()]]
    found = [torch.optim.SGD([tensor.detach().clone() for tensor in own], lr=0.1) for own in tensors]
    dist.destroy_process_group()
    yield found
    found.clear()


@pytest.mark.parametrize("kind", ["", "one by one", "attributes", "flat"])
@pytest.mark.parametrize("moved", [0, 1])
def test_other_optimizers_stay_as_they_are(
    foreign: list[torch.optim.Optimizer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    moved: int,
) -> None:
    """Only optimizers that step are part of the recorded job, with or without copies of its parameters."""
    plain = [tensor for optimizer in foreign[:3] for tensor in optimizer.param_groups[0]["params"]]
    before = [tensor.detach().clone() for tensor in plain]
    (trace,) = read_trace(train(tmp_path, kind, moved=moved, dtype=torch.bfloat16 if kind else torch.float32))
    assert not capsys.readouterr().err
    assert [step.step for step in trace.steps] == [0, 1, 2]
    assert {entry.piece.name for entry in trace.steps[0].entries if entry.moment is Moment.GRADIENT} == {
        f"{number}.{name}" for number in range(5) for name in ("weight", "bias")
    }
    assert all(torch.equal(tensor, values) for tensor, values in zip(plain, before, strict=True))


class Unfinished(nn.Module):
    """A module that has not called `nn.Module.__init__`."""

    def __init__(self) -> None:
        pass


def test_a_module_without_parameters_of_its_own_ends_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as one whose constructor runs at this moment."""
    unfinished = Unfinished()
    (trace,) = read_trace(train(tmp_path, "one by one"))
    assert not capsys.readouterr().err
    assert len(trace.steps) == 3
    del unfinished
