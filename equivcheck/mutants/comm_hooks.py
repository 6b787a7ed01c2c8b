"""Reductions of gradients by `DistributedDataParallel`, replaced through its communication hook."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from equivcheck.layouts.parallelisms.replicate.torch_private import wrapper_of
from equivcheck.training.setup import Setup

Reduce = Callable[[GradBucket, dist.ProcessGroup], "torch.futures.Future[torch.Tensor]"]
"""What becomes of a bucket of gradients that are to be averaged over a group."""


def ddp_of(setup: Setup) -> DistributedDataParallel | None:
    """The `DistributedDataParallel` that reduces the gradients of a setup; None where something else does."""
    if isinstance(setup.module, DistributedDataParallel):
        return setup.module
    return wrapper_of(setup.model)


def reduce_by(setup: Setup, reduce: Reduce) -> None:
    """Let gradients be reduced otherwise; nothing where no `DistributedDataParallel` does it."""
    module = ddp_of(setup)
    if module is not None:
        # Without annotations, as they would be compared with types and are strings here.
        module.register_comm_hook(None, lambda _state, bucket: reduce(bucket, module.process_group))


def kept(bucket: GradBucket, _group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """The bucket as this rank has it."""
    return done(bucket.buffer())


def lost(bucket: GradBucket, _group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Zeros in place of the bucket."""
    return done(torch.zeros_like(bucket.buffer()))


def summed(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """The sum over ranks."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda result: result.value()[0])  # type: ignore[no-any-return]


def averaged(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks, as it should be: to the last bit, where gradients are no views into buckets."""
    bucket.buffer().mul_(1.0 / group.size())
    return summed(bucket, group)


def averaged_in(dtype: torch.dtype, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks, sent and added up in another element type."""
    values = bucket.buffer()
    low = values.to(dtype).div_(group.size())
    future = dist.all_reduce(low, group=group, async_op=True).get_future()
    return future.then(lambda result: values.copy_(result.value()[0]))  # type: ignore[no-any-return]


class Unawaited:
    """The mean over ranks, taken as done as soon as it has begun."""

    def __init__(self) -> None:
        self._begun: list[dist.Work] = []

    def __call__(self, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        """Begin, and go on with what is there."""
        values = bucket.buffer().div_(group.size())
        work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None, "it is asynchronous"
        self._begun.append(work)
        return done(values)

    def wait(self) -> None:
        """Wait for all that has begun."""
        while self._begun:
            self._begun.pop().wait()


def done(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has its value."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(values)
    return future
