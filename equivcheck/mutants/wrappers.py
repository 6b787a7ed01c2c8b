"""`DistributedDataParallel` used wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from equivcheck.mutants.axes import data_rank, mesh_of
from equivcheck.mutants.reductions import averaged, done, kept, reduce_by, summed, wrapper
from equivcheck.scenario.mesh import TP
from equivcheck.train.setup import Setup


def reduce_nothing(setup: Setup) -> None:
    """Keep every bucket as this rank has it."""
    reduce_by(setup, kept)


def sum_up(setup: Setup) -> None:
    """Sum up over ranks, and divide by nothing."""
    reduce_by(setup, summed)


def keep_last_bucket(setup: Setup) -> None:
    """Reduce all buckets but the last."""
    reduce_by(setup, lambda bucket, group: (kept if bucket.is_last() else averaged)(bucket, group))


def lose_last_bucket(setup: Setup) -> None:
    """Reduce all buckets but the last, of which nothing arrives."""
    reduce_by(setup, lambda bucket, group: _nothing(bucket) if bucket.is_last() else averaged(bucket, group))


def _nothing(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return done(torch.zeros_like(bucket.buffer()))


def reduce_over_other_axis(setup: Setup) -> None:
    """Average over the ranks that split the model rather than those that split the batch."""
    group = mesh_of(setup).get_group(TP)
    reduce_by(setup, lambda bucket, _group: averaged(bucket, group))


def forward_without_sync(setup: Setup) -> None:
    """Run each forward under `no_sync` and its backward outside."""
    module, inner = wrapper(setup), setup.around_forward
    if module is None:
        return

    @contextmanager
    def around() -> Iterator[None]:
        with inner(), module.no_sync():
            yield

    setup.around_forward = around


def call_inner_module(setup: Setup) -> None:
    """Call the module inside the wrapper."""
    if isinstance(setup.module, DistributedDataParallel):
        setup.module = setup.module.module


def look_for_nothing_unused(setup: Setup) -> None:
    """Wrap without `find_unused_parameters`."""
    before = setup.module
    if not isinstance(before, DistributedDataParallel):
        return
    with setup.accumulation(False):
        skips = not before.require_backward_grad_sync
    module = DistributedDataParallel(
        before.module, process_group=before.process_group, bucket_cap_mb=before.bucket_bytes_cap / 2**20
    )
    setup.module = module
    setup.accumulation = lambda last: module.no_sync() if skips and not last else nullcontext()


def keep_buffers_apart(setup: Setup) -> None:
    """Let ranks but the first have another offset, and send them none."""
    module = wrapper(setup)
    if module is not None:
        module.broadcast_buffers = False
    for name, buffer in setup.model.named_buffers():
        if name.endswith("offset"):
            buffer.add_(data_rank(setup))
