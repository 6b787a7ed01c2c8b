"""Load-balancing losses in pipeline stages.

Only the last stage computes the main loss, so each stage adds its layers' losses to its activations' graph, as Megatron-LM
does with `MoEAuxLossAutoScaler` (`megatron/core/transformer/moe/moe_utils.py`). The losses' values are summed over stages
afterwards, only to report them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equivcheck.layouts.parallelisms.pipeline.stage_layers import StageLayers
from equivcheck.scenario import Pipeline
from equivcheck.training.balance import balance_loss, routing_loads
from equivcheck.training.setup import Setup


class AddedLoss(torch.autograd.Function):
    """Identity on activations that also starts another loss's backward, with a constant gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the values unchanged. `scale` is the loss's gradient."""
        ctx.gradient = torch.full_like(loss, scale)
        # Returning `values` would make the result a view, and zero-bubble schedules detach a stage's output in place.
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the values' gradient unchanged, and the loss's constant gradient."""
        return gradients[0], ctx.gradient, None


@dataclass(slots=True, kw_only=True, eq=False)
class StageBalance:
    """One stage's load-balancing losses."""

    setup: Setup
    """This rank's setup."""
    scale: float
    """Factor on the loss's gradient, so that `scale_grads` can divide by it afterwards."""
    last: torch.Tensor | None = None
    """Loss in the last forward, which may have been one that infers shapes."""
    total: float = 0.0
    """Sum over the current step's chunks."""

    def add(self, stage: StageLayers, values: torch.Tensor) -> torch.Tensor:
        """Add its layers' losses to the graph behind the stage's activations `values`."""
        loads = routing_loads(stage)
        if not loads:
            return values
        loss = balance_loss(loads, [load.counts for load in loads], self._num_positions(stage.step))
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        self.last = loss.detach()
        added: torch.Tensor = AddedLoss.apply(values, loss, self.setup.gradient_scale * self.scale)  # type: ignore[no-untyped-call]
        return added

    def _num_positions(self, step: int) -> int:
        """Return this rank's positions in a step. A step's loss is summed over chunks and averaged over data-parallel ranks."""
        training, layout = self.setup.training, self.setup.layout
        assert layout is not None, "a layout is applied"
        return training.rows_at(step) * (training.model.length or 1) // layout.num_data_ranks

    def keep(self) -> None:
        """Add the last forward's loss to the step's sum."""
        self.total += 0.0 if self.last is None else float(self.last)

    def take(self) -> float:
        """Return the step's sum, and start a new one."""
        total, self.total = self.total, 0.0
        return total


def add_balance(setup: Setup, parallelism: Pipeline, stages: list[StageLayers]) -> None:
    """Let each stage add its layers' load-balancing losses, if the model has any."""
    if setup.training.model.balances:
        scale = float(parallelism.num_chunks if parallelism.scale_grads else 1)
        for stage in stages:
            stage.balance = StageBalance(setup=setup, scale=scale)


def balance_over_stages(stages: list[StageLayers], dtype: torch.dtype, group: dist.ProcessGroup) -> float:
    """Sum a step's load-balancing losses over all stages. Every rank in the pipeline must call this function."""
    total = torch.tensor(sum(stage.balance.take() for stage in stages if stage.balance is not None), dtype=dtype)
    dist.all_reduce(total, group=group)
    return float(total)
