"""Buffers are compared after each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import check_training
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.reader import Reader
from equivcheck.worlds.trace.differences import Difference, Phase
from support.verdicts import first_divergence
from unit.user.diagnosis.wrong_trainings import nothing, step_of
from unit.user.programs import brought, in_ddp


class Center(nn.Module):
    """A layer that keeps the mean of its last inputs. Nothing reads it."""

    wrong_step: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_steps = nn.Linear(4, 2), 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.detach().mean(0)
        if dist.is_initialized() and self.num_steps != self.wrong_step:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        self.mean, self.num_steps = mean, self.num_steps + 1
        return self.linear(inputs)


def unreduced_at(step: int | None) -> object:
    """Data parallelism that leaves the mean unreduced at one step."""

    def parallelize(model: Center, mesh: DeviceMesh) -> nn.Module:
        model.wrong_step = step
        return in_ddp(model, mesh)

    return parallelize


def test_a_buffer_is_compared_at_the_step_at_which_it_is_wrong() -> None:
    """A buffer that is wrong after the second of three steps, and right after the third, is reported."""
    first = first_divergence(check_training(**brought(model=Center, parallelize=unreduced_at(1)), explain=False))
    assert (first.step, first.phase, first.tensor) == (1, Phase.BUFFER, "mean")


def test_buffers_that_agree_at_each_step_are_equivalent() -> None:
    """A module may replace its buffer in every step."""
    assert check_training(**brought(model=Center, parallelize=unreduced_at(None))).outcome is Outcome.EQUIVALENT


def test_a_buffer_that_only_ranks_have_is_reported() -> None:
    """A model without buffers on one device is compared with ranks that have one."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model[0].register_buffer("extra", torch.ones(2))
        return in_ddp(model, mesh)

    first = first_divergence(check_training(**brought(parallelize=parallelize), explain=False))
    assert (first.tensor, first.difference) == ("0.extra", Difference.EXTRA)


def test_a_buffer_that_ranks_lack_is_reported() -> None:
    """A model with buffers is compared with ranks that have none."""

    def parallelize(model: Center, mesh: DeviceMesh) -> nn.Module:
        model.forward = model.linear.forward
        del model.mean
        return in_ddp(model, mesh)

    first = first_divergence(check_training(**brought(model=Center, parallelize=parallelize), explain=False))
    assert (first.tensor, first.difference) == ("mean", Difference.MISSING)


def test_buffers_of_all_types_are_read_at_each_step() -> None:
    """Integers, complex numbers, bfloat16 and values with a graph are read, and a buffer may be None for a while."""
    model = nn.Module()
    for name, value in {"count": torch.tensor(1), "turn": torch.ones(2, dtype=torch.complex64)}.items():
        model.register_buffer(name, value)
    model.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
    reader = Reader(TensorNames(model), model)
    first = reader.step_buffers()
    model.count, model.turn = model.count + 1, model.turn * 1j
    second = reader.step_buffers()
    model.short, model.count = torch.ones(3, requires_grad=True) * 3, None
    third = reader.step_buffers()
    assert [list(each.values) for each in (first, second, third)] == [
        [1, 1, 0, 1, 0, 1, 1, 1],
        [2, 0, 1, 0, 1, 1, 1, 1],
        [0, 1, 0, 1, 3, 3, 3],
    ]
    assert second.pieces is first.pieces
    assert third.present == (False, True, True)


class Signs(nn.Module):
    """A layer with a buffer that moves by the sign of the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("signs", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)


def moving_signs(num_writes: int, amount: float = 1.0) -> Any:
    """A step after which the buffer moves, several times or by another amount."""
    own = step_of(reduce=nothing)

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        value, signs = own(model, batch, optimizer, loss), getattr(model, "module", model).signs
        for number in range(num_writes):
            signs += torch.tensor([1.0, -1.0, 1.0, -1.0]) if number else torch.full((4,), amount)
        return value

    return step


@pytest.mark.usefixtures("with_causes")
def test_a_buffer_that_ranks_change_more_often_is_a_hint() -> None:
    """The hint names the buffer and both numbers. DDP broadcasts the buffer as well, which does not count."""
    given = {"model": Signs, "step": moving_signs(1)}
    words = "each rank changes `signs` in place 2 times in a step, and one device changes it once"
    assert check_training(**brought(**given, rank_step=moving_signs(2))).hint == words
    assert "in place" not in check_training(**brought(**given, rank_step=moving_signs(1, 3.0))).hint
