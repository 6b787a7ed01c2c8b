"""Operations as users write them, right and wrong: custom ones with sharding rules, `autograd.Function`, `local_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map, register_sharding


@torch.library.custom_op("equivcheck_tests::centered", mutates_args=())
def centered(x: torch.Tensor) -> torch.Tensor:
    """Each row minus its mean."""
    return x - x.mean(-1, keepdim=True)


@centered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return centered(gradient)


centered.register_autograd(_backward)


def less_its_mean(x: Any) -> Any:
    """Calls the custom operation, and can be sent to processes."""
    return centered(x)


def register_rows_only() -> None:
    """Correct rule: rows may be sharded, partial sums stay partial (the operation is linear), the last dim is replicated."""

    @register_sharding(torch.ops.equivcheck_tests.centered.default)
    def rule(x: Any) -> Any:
        rows = [([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim - 1)]
        return [([Replicate()], [Replicate()]), ([Partial()], [Partial()]), *rows]


def register_any_dim() -> None:
    """Wrong rule: it also allows a sharded last dim, so that each rank subtracts its own mean."""

    @register_sharding(torch.ops.equivcheck_tests.centered.default)
    def rule(x: Any) -> Any:
        return [([Replicate()], [Replicate()]), *[([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim)]]


class ScaledSum(torch.autograd.Function):
    """The sum of squares, with an explicit derivative."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """The value."""
        context.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Twice the value times the gradient."""
        (x,) = context.saved_tensors
        return 2 * x * gradients[0]


class LocalSum(torch.autograd.Function):
    """Wrong: it sums the local tensor and calls the result replicated."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        """The sum of the local part."""
        context.shape = x.shape
        context.mesh = x.device_mesh if isinstance(x, DTensor) else None
        if not isinstance(x, DTensor):
            return x.sum()
        return DTensor.from_local(x.to_local().sum(), x.device_mesh, [Replicate()])

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Expand the gradient to all elements."""
        return gradients[0].expand(context.shape)


def _weighted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) * weight


def weighted_on(gradients: bool) -> Callable[[DeviceMesh], Callable[..., Any]]:
    """Local rows times a replicated weight. Its gradient is partial, which `local_map` knows only with `gradients`."""
    by_rows = [Shard(0)], [Replicate()]

    def made(mesh: DeviceMesh) -> Callable[..., Any]:
        return local_map(
            _weighted,
            out_placements=[Shard(0)],
            in_placements=by_rows,
            in_grad_placements=([Shard(0)], [Partial()]) if gradients else None,
            device_mesh=mesh,
        )

    return made


weighted = _weighted


def refused_by_the_first(x: Any) -> Any:
    """Rank 0 refuses; the others go on, and wait for it."""
    if isinstance(x, DTensor) and dist.get_rank() == 0 and x.placements[0].is_shard():
        raise NotImplementedError("shards are not supported on this rank")
    return x.sum()
