"""Models that compute in float32 are named, and kept in float64 if users ask for it."""

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
"""A relative error below float32's tolerances."""


class RMSNorm(nn.Module):
    """The norm in Llama in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize in float32."""
        kind, wide = hidden.dtype, hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed: torch.Tensor = self.weight * wide.to(kind)
        return normed


class Model(nn.Module):
    """A norm, a softmax, and a product, all in float32."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), RMSNorm(8), nn.Linear(8, 2)
        self.register_buffer("turns", torch.eye(8))
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Ask for float32 in every possible way."""
        hidden = self.first(inputs)
        normed = self.norm(hidden) if self.recompute is None else checkpoint(self.norm, hidden, use_reentrant=self.recompute)
        weights = torch.softmax(hidden, -1, dtype=torch.float32)
        turned = self.turns.float() @ torch.arange(8, dtype=torch.int64)[:, None].float()
        outputs: torch.Tensor = self.head(normed + (weights.float() + turned.T * 0.01).to(hidden.dtype))
        return outputs


def slightly_wrong(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change one gradient by the relative error `TINY`."""
    model.head.weight.register_hook(lambda gradient: gradient * (1 + TINY))
    return in_ddp(model, mesh)


def test_small_mistakes_show_where_the_type_is_kept() -> None:
    """`keep_dtype` finds an error that float32's tolerances hide."""
    missed = check_training(**brought(model=Model, parallelize=slightly_wrong))
    found = check_training(**brought(model=Model, parallelize=slightly_wrong, keep_dtype=True))
    honest = check_training(**brought(model=Model, keep_dtype=True))
    assert (missed.outcome, missed.precision) == (Outcome.EQUIVALENT, "float32")
    assert (found.outcome, found.precision) == (Outcome.DIVERGED, "float64")
    assert (honest.outcome, honest.precision) == (Outcome.EQUIVALENT, "float64"), honest.describe()
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.tensor) == (0, "head.weight")


def test_modules_that_leave_the_type_are_named() -> None:
    """The note names module, function and remedy."""
    (note,) = check_training(**brought(model=Model)).notes
    assert note.startswith(
        "float64 becomes float32 in RMSNorm 'norm' (function 'to'), and 1 more, so tolerances are those of float32"
    )
    assert "keep_dtype=True" in note


def test_a_type_that_is_kept_is_declared() -> None:
    """A note says that the training was changed."""
    assert check_training(**brought(model=Model, keep_dtype=True)).notes == (KEPT,)
    assert check_training(**brought()).notes == ()


def test_losses_that_leave_the_type_are_named() -> None:
    """Casts outside any module belong to the loss or the step."""
    arguments = brought(loss=lambda outputs, targets: (outputs.float() - targets.float()).pow(2).mean())
    (note,) = check_training(**arguments).notes
    assert "float32 in the loss or the step (function 'float'), " in note
    assert check_training(**arguments, keep_dtype=True).precision == "float64"


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_keeps_its_type(reentrant: bool) -> None:
    """Activation checkpointing calls modules during backward."""

    def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh)

    verdict = check_training(**brought(model=lambda: Model(reentrant), parallelize=sharded, keep_dtype=True))
    assert (verdict.outcome, verdict.precision) == (Outcome.EQUIVALENT, "float64"), verdict.describe()


def test_optimizers_keep_the_types_of_their_state() -> None:
    """A fused update reads its counter as float32."""
    made: list[torch.optim.Optimizer] = []

    def fused(parameters: list[Any]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, fused=True))
        return made[-1]

    check_training(**brought(model=Model, optimizer=fused, keep_dtype=True)).assert_equivalent()
    assert {state["step"].dtype for optimizer in made for state in optimizer.state.values()} == {torch.float32}


def doubled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Multiply all gradients by the number of ranks."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return in_ddp(model, mesh)


@pytest.mark.usefixtures("with_causes")
def test_causes_are_found_where_types_are_kept() -> None:
    """The diagnosis intercepts backward passes under `keep_dtype`, too."""
    verdict = check_training(**brought(model=Model, parallelize=doubled, keep_dtype=True))
    assert verdict.kinds == (Cause.SUMMED,), verdict.describe()


@pytest.mark.usefixtures("with_causes")
def test_a_cause_in_float32_is_no_cause_where_types_are_kept() -> None:
    """Candidates in float32 stay in float32, so the loss has one cause."""

    def own_mean(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        errors = (model(batch[0]) - batch[1]).pow(2).mean(1)
        value = (errors * batch[1][:, 0].abs()).sum() / batch[1][:, 0].abs().sum()
        value.backward()
        optimizer.step()
        return value

    verdict = check_training(**brought(model=Model, step=own_mean, keep_dtype=True))
    assert verdict.kinds == (Cause.MEAN_OF_MEANS,), verdict.describe()
