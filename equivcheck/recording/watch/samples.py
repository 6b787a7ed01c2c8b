"""Bit-exact hashes of samples, which are the rows of a batch. Equal hashes show that two runs train on the same samples.

A hash does not depend on the row's position in the batch, nor on the device. Context- and sequence-parallel ranks hold a part of
each row and hash this part, so their hashes differ from those of complete rows. Zeros at a row's end, as padding with 0 adds
them, do not change the hash. Other padding does, so equal training samples may have other hashes in batches of another size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from equivcheck.recording.exact import mix_words
from equivcheck.recording.signs import splitmix64
from equivcheck.recording.tensors import local_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integers by an element's size in bytes. Eight bytes are two integers: a product with 2**63 would have one bit only."""
_SLAB = 2**18
"""Integers that are multiplied at once."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples, dataclasses and mappings. Mappings are sorted by key."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def hash_samples(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return an int64 hash for each sample, on the first tensor's device.

    The first tensor has one row for each sample. The hash covers this row in all tensors with equally many rows. All other
    tensors, such as a temperature without dims, are ignored. Returns None if no tensor has rows.
    """
    locals_ = [local_of(tensor) for tensor in tensors if tensor.dim() and tensor.layout is torch.strided]
    if not locals_ or not len(locals_[0]):
        return None
    hashes = torch.zeros(len(locals_[0]), dtype=torch.int64, device=locals_[0].device)
    for tensor in locals_:
        if len(tensor) == len(hashes):
            hashes = mix_words(hashes + _weighted_sums(tensor).to(hashes.device))
    return hashes


def _weighted_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum each row's bits times a weight for the column, modulo 2**64."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = real.reshape(len(real), -1).contiguous()
    bits = rows.view(torch.uint8 if rows.dtype is torch.bool else _INTEGERS[rows.element_size()])
    weights = _weights(bits.shape[1], bits.device)
    height = max(_SLAB // max(len(weights), 1), 1)
    return torch.cat([(slab.to(torch.int64) * weights).sum(1) for slab in torch.split(bits, height)])


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    hashes = splitmix64(np.arange(count, dtype=np.uint64)) | np.uint64(1)  # odd, so that no bit is lost
    return torch.from_numpy(hashes.view(np.int64)).to(device)
