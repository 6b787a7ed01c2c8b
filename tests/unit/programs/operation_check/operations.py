"""Operations as users write them: custom ones with sharding rules, `autograd.Function`, `local_map`; right and wrong."""

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
    """Each row less its mean."""
    return x - x.mean(-1, keepdim=True)


@centered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return centered(gradient)


centered.register_autograd(_backward)


def less_its_mean(x: Any) -> Any:
    """A function that calls the custom operation, and can be sent to processes."""
    return centered(x)


def register_rows_only() -> None:
    """The right rule: rows may be cut, and addends of a sum stay addends, as it is linear; the last dim must be whole."""

    @register_sharding(torch.ops.equivcheck_tests.centered.default)
    def rule(x: Any) -> Any:
        rows = [([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim - 1)]
        return [([Replicate()], [Replicate()]), ([Partial()], [Partial()]), *rows]


def register_any_dim() -> None:
    """A wrong rule: it has the last dim cut as well, so that each rank subtracts a mean of its own."""

    @register_sharding(torch.ops.equivcheck_tests.centered.default)
    def rule(x: Any) -> Any:
        return [([Replicate()], [Replicate()]), *[([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim)]]


class ScaledSum(torch.autograd.Function):
    """The sum of squares, with a derivative by hand."""

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
    """A wrong one: it works on what the rank has, and calls the result replicated."""

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
        """The same for all elements."""
        return gradients[0].expand(context.shape)


def _weighted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) * weight


def weighted_on(gradients: bool) -> Callable[[DeviceMesh], Callable[..., Any]]:
    """Rows of each rank times a replicated weight, whose gradient is pending a sum: said so only with `gradients`."""
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
    """Rank 0 says that it does not take it; the others go on, and wait for it."""
    if isinstance(x, DTensor) and dist.get_rank() == 0 and x.placements[0].is_shard():
        raise NotImplementedError("shards are not supported on this rank")
    return x.sum()
