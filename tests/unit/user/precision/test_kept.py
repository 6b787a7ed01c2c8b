"""Models that compute in float32 whatever their type is: named, and kept from it where users ask for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from equivcheck import Outcome, check_training
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.precision.advice import KEPT
from unit.user.programs import brought, in_ddp

TINY = 1e-7
"""Relative size of a mistake that no tolerance of float32 can tell."""


class RMSNorm(nn.Module):
    """As that of Llama in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalized in float32."""
        kind, wide = hidden.dtype, hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed: torch.Tensor = self.weight * wide.to(kind)
        return normed


class Model(nn.Module):
    """A norm, weights by softmax, and a product in float32 whose other operand is an integer's."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), RMSNorm(8), nn.Linear(8, 2)
        self.register_buffer("turns", torch.eye(8))
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Float32 asked for in every way that there is."""
        hidden = self.first(inputs)
        normed = self.norm(hidden) if self.recompute is None else checkpoint(self.norm, hidden, use_reentrant=self.recompute)
        weights = torch.softmax(hidden, -1, dtype=torch.float32)
        turned = self.turns.float() @ torch.arange(8, dtype=torch.int64)[:, None].float()
        outputs: torch.Tensor = self.head(normed + (weights.float() + turned.T * 0.01).to(hidden.dtype))
        return outputs


def slightly_wrong(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """One gradient off by `TINY` of it."""
    model.head.weight.register_hook(lambda gradient: gradient * (1 + TINY))
    return in_ddp(model, mesh)


def test_small_mistakes_show_where_the_type_is_kept() -> None:
    """What tolerances of float32 hide is found with `keep_dtype`, and honest ranks are equivalent in float64."""
    missed = check_training(**brought(model=Model, parallelize=slightly_wrong))
    found = check_training(**brought(model=Model, parallelize=slightly_wrong, keep_dtype=True))
    honest = check_training(**brought(model=Model, keep_dtype=True))
    assert (missed.outcome, missed.precision) == (Outcome.EQUIVALENT, "float32")
    assert (found.outcome, found.precision) == (Outcome.DIVERGED, "float64")
    assert (honest.outcome, honest.precision) == (Outcome.EQUIVALENT, "float64"), honest.describe()
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.tensor) == (0, "head.weight")


def test_modules_that_leave_the_type_are_named() -> None:
    """The verdict says which module computes in fewer digits, by which function, and what keeps it from that."""
    (note,) = check_training(**brought(model=Model)).notes
    assert note.startswith("float64 becomes float32 in RMSNorm 'norm' (to), and 1 more, so tolerances are those of float32")
    assert "keep_dtype=True" in note


def test_a_type_that_is_kept_is_declared() -> None:
    """A training that was changed says so, and nothing else where nothing leaves the type any more."""
    assert check_training(**brought(model=Model, keep_dtype=True)).notes == (KEPT,)
    assert check_training(**brought()).notes == ()


def test_losses_that_leave_the_type_are_named() -> None:
    """What no module computes is the loss, or the step."""
    arguments = brought(loss=lambda outputs, targets: (outputs.float() - targets.float()).pow(2).mean())
    (note,) = check_training(**arguments).notes
    assert "float32 in the loss or the step (float), " in note
    assert check_training(**arguments, keep_dtype=True).precision == "float64"


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_keeps_its_type(reentrant: bool) -> None:
    """Activation checkpointing calls modules during backward."""

    def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh)

    verdict = check_training(**brought(model=lambda: Model(reentrant), parallelize=sharded, keep_dtype=True))
    assert (verdict.outcome, verdict.precision) == (Outcome.EQUIVALENT, "float64"), verdict.describe()


def test_optimizers_keep_the_types_of_their_state() -> None:
    """A fused update reads its counter as float32, whatever is kept."""
    made: list[torch.optim.Optimizer] = []

    def fused(parameters: list[Any]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, fused=True))
        return made[-1]

    check_training(**brought(model=Model, optimizer=fused, keep_dtype=True)).assert_equivalent()
    assert {state["step"].dtype for optimizer in made for state in optimizer.state.values()} == {torch.float32}


def doubled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """All gradients off by the number of ranks."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return in_ddp(model, mesh)


@pytest.mark.usefixtures("with_causes")
def test_causes_are_found_where_types_are_kept() -> None:
    """Backward passes come by diagnosis, whichever way they take."""
    verdict = check_training(**brought(model=Model, parallelize=doubled, keep_dtype=True))
    assert verdict.kinds == (Cause.SUMMED,), verdict.describe()


@pytest.mark.usefixtures("with_causes")
def test_a_cause_in_float32_is_no_cause_where_types_are_kept() -> None:
    """Nor does what diagnosis tries in float32 become float64: a loss that is no mean over rows has one cause."""

    def own_mean(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        errors = (model(batch[0]) - batch[1]).pow(2).mean(1)
        value = (errors * batch[1][:, 0].abs()).sum() / batch[1][:, 0].abs().sum()
        value.backward()
        optimizer.step()
        return value

    verdict = check_training(**brought(model=Model, step=own_mean, keep_dtype=True))
    assert verdict.kinds == (Cause.MEAN_OF_MEANS,), verdict.describe()
