"""Trainings with wrong gradients or a wrong loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unit.user.diagnosis.wrong_trainings import (
    MAX_NORM,
    Wrong,
    averaged,
    by_hand,
    clip,
    clipping_step,
    nothing,
    off_rank,
    rank,
    step_of,
    two_microbatches,
)
from unit.user.programs import batches, brought, sgd_of


def clip_each(parameters: list[torch.Tensor]) -> None:
    """Clip each tensor by its own norm."""
    for parameter in parameters:
        clip([parameter])


def clipped_and_averaged(parameters: list[torch.Tensor]) -> None:
    """Clip first, then average."""
    clip(parameters)
    averaged(parameters)


def summed(parameters: list[torch.Tensor]) -> None:
    """Sum without division."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)


def pairs(parameters: list[torch.Tensor]) -> None:
    """Average over two adjacent ranks out of four."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    averaged(parameters, groups[rank() // 2])


class Stale:
    """Use the previous step's gradients."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, parameters: list[torch.Tensor]) -> None:
        """Swap in the previous gradients."""
        averaged(parameters)
        for number, parameter in enumerate(parameters):
            fresh = parameter.grad.clone()
            parameter.grad = self.kept.get((rank(), number), fresh).clone()
            self.kept[rank(), number] = fresh


def first_microbatch_only(parameters: list[torch.Tensor], number: int) -> None:
    """Reduce only after the first microbatch."""
    if number == 0:
        averaged(parameters)


def bucket_boundary(parameters: list[torch.Tensor]) -> None:
    """Leave out the last elements in a flat bucket."""
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
    averages = flat.clone()
    dist.all_reduce(averages)
    averages /= dist.get_world_size()
    whole = len(flat) // 16 * 16
    flat[:whole] = averages[:whole]
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def in_bfloat16(parameters: list[torch.Tensor]) -> None:
    """Reduce in bfloat16."""
    for parameter in parameters:
        sent = parameter.grad.to(torch.bfloat16)
        dist.all_reduce(sent)
        parameter.grad.copy_(sent.to(parameter.grad.dtype) / dist.get_world_size())


def half_zero(gradient: torch.Tensor) -> torch.Tensor:
    """Zero the first rows."""
    return torch.cat([torch.zeros_like(gradient[:3]), gradient[3:]])


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    """Average, then change the first gradient."""

    def reduce(parameters: list[torch.Tensor]) -> None:
        averaged(parameters)
        parameters[0].grad = change(parameters[0].grad)

    return reduce


def not_waited_for(parameters: list[torch.Tensor]) -> None:
    """Read an asynchronous reduction before it is done."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, async_op=True)
        parameter.grad /= dist.get_world_size()


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over rows with unmasked targets."""
    mask = (targets[:, :1] > -0.5).to(outputs.dtype)  # at least one row of each rank
    return ((outputs - targets).square() * mask).sum() / mask.sum()


def other_inputs(batch: Any, mesh: DeviceMesh) -> Any:
    """Pair this rank's targets with the other rank's inputs."""
    inputs, targets = batch
    me = mesh.get_local_rank()
    return inputs.chunk(2)[1 - me].clone(), targets.chunk(2)[me].clone()


def started_apart(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Draw another head on each rank."""
    with torch.no_grad():
        model[3].weight += 0.01 * mesh.get_rank()
    return model


def by_autograd_grad(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
    """Compute gradients without a backward pass, so that DDP's hooks do not run."""
    value, parameters = loss(model(batch[0]), batch[1]), list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return value


class LowRank(nn.Module):
    """A matrix in two factors. The second starts at zero, so the first gets no gradient in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(2, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply both factors."""
        return inputs @ self.first.T @ self.second.T


def zeroed_except_first(_optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Zero all gradients but the first."""
    for parameter in parameters[1:]:
        parameter.grad = None


GRADIENTS: dict[str, Wrong] = {
    "not_reduced": by_hand("left unreduced over the 2 dp ranks", first=0, reduce=nothing),
    "not_reduced_without_backward": Wrong(
        says="all gradients are left unreduced over the 2 dp ranks", brought=brought(step=by_autograd_grad), step=0
    ),
    "summed": by_hand("the sum over the 2 dp ranks, not the mean", first=0, reduce=summed),
    "wrong_group": by_hand(
        "reduced over groups of 2 ranks only: ranks 0 and 1, ranks 2 and 3",
        first=0,
        reduce=pairs,
        changes={"mesh": {"dp": 4}},
    ),
    "another_axis": by_hand(
        "reduced over the 2 shard ranks, but not over the 2 replicate ranks",
        reduce=pairs,
        changes={"mesh": {"replicate": 2, "shard": 2}},
    ),
    "gradient_stale": by_hand("gradients are from the previous step", first=1, reduce=Stale()),
    "first_microbatch_synced": by_hand(
        "the gradients are left unreduced over the 2 dp ranks in microbatch 1, and reduced in microbatch 0 only",
        reduce=nothing,
        after_each=first_microbatch_only,
        changes={"batches": two_microbatches()},
    ),
    "last_microbatch_only": by_hand(
        "microbatch 1 (the last) only", takes=lambda number: number == 1, changes={"batches": two_microbatches()}
    ),
    "bucket_boundary": by_hand("left unreduced over the 2 dp ranks", reduce=bucket_boundary),
    "zero_grad_forgotten": by_hand("not zeroed between steps", zero=False, reduce=averaged),
    "one_gradient_not_zeroed": by_hand(
        "the gradient of `0.weight` is not zeroed between steps", zero=False, after_update=zeroed_except_first
    ),
    "no_gradient_zeroed_one_is_zero": by_hand(
        "gradients are not zeroed between steps",
        zero=False,
        changes={"model": LowRank, "batches": batches(steps=2), "optimizer": sgd_of},
    ),
    "lost_rows": by_hand("the gradients of rows 0 to 2 of `0.weight` are zero", reduce=changed(half_zero)),
    "bf16_reduction": by_hand("reduced in bfloat16", reduce=in_bfloat16),
    "token_count_local": by_hand("not a mean over rows", changes={"loss": token_loss, "batches": batches(12)}),
    "same_rows": by_hand(
        "every rank computes on the rows of rank 0",
        changes={"shard": lambda batch, _mesh: tuple(each[:2].clone() for each in batch)},
    ),
    "permuted_inputs": by_hand("they pair rows of tensors that do not belong together", changes={"shard": other_inputs}),
    "unequal_start": by_hand("rank 1 starts with other values of `3.weight`", changes={"parallelize": started_apart}),
    "clip_on_one_rank": by_hand("rank 1 does not clip", clips=off_rank(1, clip), of_one=clipping_step),
    "clip_before_reduction": by_hand(
        "clips the gradients of its own rows before they are reduced",
        reduce=clipped_and_averaged,
        of_one=clipping_step,
    ),
    "clip_before_and_after_reduction": by_hand(
        "clips the gradients of its own rows before they are reduced",
        reduce=clipped_and_averaged,
        clips=clip,
        of_one=clipping_step,
    ),
    "not_clipped": by_hand("gradients are not clipped", of_one=clipping_step),
    "tensors_not_clipped": by_hand("gradients are not clipped", of_one=step_of(reduce=nothing, clips=clip_each)),
    "replicas_in_norm": by_hand(
        "counts gradients replicated over the 2 dp ranks once per rank",
        clips=lambda parameters: nn.utils.clip_grads_with_norm_(
            parameters, MAX_NORM, nn.utils.get_total_norm([parameter.grad for parameter in parameters]) * 2**0.5
        ),
        of_one=clipping_step,
    ),
    "async_not_waited_for": by_hand("", reduce=not_waited_for),
    "logged_loss": Wrong(
        says="your ranks train correctly, but the loss that they return is 2 times the loss, the number of dp ranks",
        brought=brought(
            parallelize=lambda model, _mesh: model,
            rank_step=lambda *arguments: 2 * step_of()(*arguments),
        ),
    ),
}
"""Mistakes in gradients or in the loss."""
