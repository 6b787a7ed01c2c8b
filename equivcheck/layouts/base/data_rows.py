"""Split each microbatch's rows over data-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from equivcheck.scenario import ActivationSharding, LayerPlan
from equivcheck.training.material import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.training.balance import Counts
    from equivcheck.training.setup import Setup


def take_rows(setup: Setup, mesh: DeviceMesh, *, propagates: bool = False) -> None:
    """Give this rank its rows in each microbatch. Outer parallelisms split the rows first.

    Counts in layers, such as tokens per expert, are summed over ranks. Set `propagates` to True if activations are DTensors: this
    function then leaves the sum to DTensor.
    """
    if not propagates:
        for dim in range(mesh.ndim):
            sum_counts(setup, mesh.get_group(dim))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    shape = tuple(mesh.shape)
    rank = sum(index * math.prod(shape[axis + 1 :]) for axis, index in enumerate(coordinate))
    size, inner = math.prod(shape), setup.take
    setup.take = lambda batch: inner(rows_of(batch, rank, size))


def sum_counts(setup: Setup, group: ProcessGroup, *, splits_sequences: bool = False) -> None:
    """Sum each layer's counts, such as tokens per expert, over `group`, whose ranks have different rows or positions.

    Counts in single sequences are summed only if `splits_sequences`: the ranks have other positions in the same rows.
    """
    import torch.distributed as dist

    from equivcheck.training.balance import is_per_sequence

    inner, inner_of_step = setup.full_counts, setup.sum_counts

    def full_counts(model: nn.Module, counts: Counts, batch: Batch, index: int) -> Counts:
        found = inner(model, counts, batch, index)
        for each in found if group.size() > 1 else ():
            if splits_sequences or not is_per_sequence(each):
                dist.all_reduce(each, group=group)
        return found

    def counts_of_step(counts: torch.Tensor) -> torch.Tensor:
        found = inner_of_step(counts)
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        return found

    setup.full_counts, setup.sum_counts = full_counts, counts_of_step


def rows_of(batch: Batch, rank: int, size: int) -> Batch:
    """Return the rows for rank `rank` among `size` data-parallel ranks. `size` must divide the number of rows."""
    count = batch.rows // size
    inputs, targets = (values.narrow(batch.batch_dim, rank * count, count) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask.narrow(0, rank * count, count) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


def with_equal_chunks(batch: Batch, num_chunks: int) -> Batch:
    """Repeat the last row of chunks that have one row less than the first chunk, in inputs and masks but not in targets."""
    if batch.rows % num_chunks == 0:
        return batch
    chunks = np.array_split(np.arange(batch.rows), num_chunks)
    kept = np.concatenate([np.pad(chunk, (0, len(chunks[0]) - len(chunk)), mode="edge") for chunk in chunks]).tolist()
    masks = tuple(None if mask is None else mask[kept] for mask in batch.masks)
    return replace(batch, inputs=batch.inputs[kept], masks=masks)


def local_masks(batch: Batch, plan: tuple[LayerPlan, ...], rank: int, size: int, num_chunks: int = 1) -> Batch:
    """Return the batch with this rank's shard of each dropout mask.

    A mask is sharded like its layer's output, as the tensor-parallel `plan` says. If rows run in `num_chunks` chunks, the mask of
    each chunk is sharded separately.
    """
    batch = with_equal_chunks(batch, num_chunks)
    masks = tuple(_parts(mask, entry.output, rank, size, num_chunks) for mask, entry in zip(batch.masks, plan, strict=True))
    return replace(batch, masks=masks)


def _parts(mask: torch.Tensor | None, sharding: ActivationSharding, rank: int, size: int, num_chunks: int) -> torch.Tensor | None:
    import torch

    if mask is None or sharding is ActivationSharding.REPLICATED:
        return mask
    if num_chunks == 1:
        return _part(mask, sharding, rank, size)
    return torch.cat([_part(chunk, sharding, rank, size) for chunk in mask.chunk(num_chunks)])


def _part(mask: torch.Tensor, sharding: ActivationSharding, rank: int, size: int) -> torch.Tensor:
    dim = mask.dim() - (2 if sharding is ActivationSharding.ROWS else 1)
    parts = mask.chunk(size, dim)
    return parts[rank] if rank < len(parts) else mask.narrow(dim, 0, 0)
