"""Predicts parameter positions in `FullyShardedDataParallel`'s flat parameters, from sizes only.

With use_orig_params, each parameter starts at a multiple of 16 bytes in the unit's compute dtype (`_get_aligned_numel` in
torch.distributed.fsdp). All shards have the same length, but the last shards may have less or no data.
"""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.base.rounding import ITEM_BYTES, computed_in
from equivcheck.scenario import FSDP1, Training

ALIGNMENT_BYTES = 16
"""Parameter alignment within a flat parameter with use_orig_params."""


def alignment_of(training: Training, fsdp: FSDP1) -> int:
    """Return the alignment, in elements, of parameters within a flat parameter. It is 1 without `use_orig_params`."""
    computed = computed_in(training.precision, fsdp.mixed_precision)
    return ALIGNMENT_BYTES // ITEM_BYTES[computed.value] if fsdp.use_orig_params else 1


def flat_starts(numels: Sequence[int], alignment: int) -> tuple[int, ...]:
    """Return each parameter's first index in the flat parameter. The last entry is the size of the flat parameter.

    `numels` are the parameters' numbers of elements, and `alignment` is in elements.
    """
    starts, end = [], 0
    for numel in numels:
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + numel
    return (*starts, end)


def held_of(numels: Sequence[int], alignment: int, num_shards: int, shard: int) -> tuple[int, ...]:
    """Return how many elements of each parameter are in shard number `shard` of the flat parameter."""
    *starts, end = flat_starts(numels, alignment)
    length = -(-end // num_shards)
    first, last = shard * length, (shard + 1) * length
    return tuple(max(min(last, start + numel) - max(first, start), 0) for start, numel in zip(starts, numels, strict=True))
