"""Communication hooks that make `DistributedDataParallel` reduce gradients wrongly."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, which type checkers do not see
from torch.nn.parallel import DistributedDataParallel

from equivcheck.layouts.parallelisms.replicate.torch_private import wrapper_of
from equivcheck.training.setup import Setup

Reduce = Callable[[GradBucket, dist.ProcessGroup], "torch.futures.Future[torch.Tensor]"]
"""Function that reduces a gradient bucket over a process group."""


def ddp_of(setup: Setup) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that reduces the model's gradients; None if there is none, or one for each stage."""
    if isinstance(setup.module, DistributedDataParallel):
        return setup.module
    return wrapper_of(setup.model)


def reduce_with(setup: Setup, reduce: Reduce) -> None:
    """Register `reduce` as communication hook of each `DistributedDataParallel`, which wraps the model or a pipeline stage."""
    wrapped = [part for part in setup.parts if isinstance(part, DistributedDataParallel)]
    inside = wrapper_of(setup.model)
    for module in wrapped if inside is None else [inside]:
        _register(module, reduce)


def _register(module: DistributedDataParallel, reduce: Reduce) -> None:
    # A lambda has no annotations. DDP compares them with types, but here they are strings.
    module.register_comm_hook(None, lambda _state, bucket: reduce(bucket, module.process_group))


def keep_bucket(bucket: GradBucket, _group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Return this rank's bucket unreduced, as a communication hook."""
    return completed_future(bucket.buffer())


def zero_bucket(bucket: GradBucket, _group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Replace the bucket with zeros, as a communication hook."""
    return completed_future(torch.zeros_like(bucket.buffer()))


def sum_bucket(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Sum the bucket over ranks, as a communication hook."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda result: result.value()[0])  # type: ignore[no-any-return]


def average_bucket(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over ranks, as a communication hook.

    The result is bitwise equal to DDP's own unless `gradient_as_bucket_view` is set.
    """
    bucket.buffer().mul_(1.0 / group.size())
    return sum_bucket(bucket, group)


def average_bucket_in(dtype: torch.dtype, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over ranks in the dtype `dtype`, as a communication hook."""
    values = bucket.buffer()
    low = values.to(dtype).div_(group.size())
    future = dist.all_reduce(low, group=group, async_op=True).get_future()
    return future.then(lambda result: values.copy_(result.value()[0]))  # type: ignore[no-any-return]


class AverageWithoutWaiting:
    """Communication hook that averages the bucket over ranks, but returns before the all-reduce has finished."""

    def __init__(self) -> None:
        self._begun: list[dist.Work] = []

    def __call__(self, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        """Start the all-reduce and return its unfinished result."""
        values = bucket.buffer().div_(group.size())
        work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None, "async_op=True returns a Work"
        self._begun.append(work)
        return completed_future(values)

    def wait(self) -> None:
        """Wait for all all-reduces that have not finished yet."""
        while self._begun:
            self._begun.pop().wait()


def completed_future(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that is already completed."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(values)
    return future
