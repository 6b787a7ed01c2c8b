"""How `FullyShardedDataParallel` puts parameters one after the other, and what shards hold of them: arithmetic on sizes alone.

Where it keeps original parameters, each starts at a multiple of 16 bytes in the element type that the unit computes in
(`_get_aligned_numel` of torch.distributed.fsdp). Shards are parts of equal length, the last ones smaller or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.base.rounding import ITEM_BYTES, computed_in
from equivcheck.scenario import FSDP1, Training

ALIGNMENT_BYTES = 16
"""Where a flat parameter keeps the original ones, each starts at a multiple of this."""


def alignment_of(training: Training, fsdp: FSDP1) -> int:
    """Elements of which each parameter starts at a multiple."""
    computed = computed_in(training.precision, fsdp.mixed_precision)
    return ALIGNMENT_BYTES // ITEM_BYTES[computed.value] if fsdp.use_orig_params else 1


def flat_starts(numels: Sequence[int], alignment: int) -> tuple[int, ...]:
    """Where each parameter of those sizes starts, and last where the flat parameter ends; in elements."""
    starts, end = [], 0
    for numel in numels:
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + numel
    return (*starts, end)


def held_of(numels: Sequence[int], alignment: int, num_shards: int, shard: int) -> tuple[int, ...]:
    """Elements of each parameter that one of the shards holds."""
    *starts, end = flat_starts(numels, alignment)
    length = -(-end // num_shards)
    first, last = shard * length, (shard + 1) * length
    return tuple(max(min(last, start + numel) - max(first, start), 0) for start, numel in zip(starts, numels, strict=True))
