"""Exact hashes over a tensor's bits. They add up over shards, and equal hashes mean equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from equivcheck.recording.signs import Hashes, Ints, hash_columns, hash_rows, rectangles_of
from equivcheck.worlds.trace.trace import Piece

_WORD = 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes, to view an element's bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactHash:
    """Exact hash of some elements: two sums modulo 2**64. The hashes for disjoint parts add up."""

    in_place: int
    """Sum over elements: each element's bits times an odd weight for its index. It changes if an element changes or moves."""
    anywhere: int
    """Sum over the elements' hashed bits. It does not change if elements only move."""

    def __add__(self, other: ExactHash) -> ExactHash:
        return ExactHash(in_place=(self.in_place + other.in_place) % _WORD, anywhere=(self.anywhere + other.anywhere) % _WORD)


def hash_parts(parts: Sequence[tuple[Piece, torch.Tensor]]) -> list[ExactHash]:
    """Return the hash of each local tensor.

    All tensors are on one device, and each has its position in a full tensor. Complex tensors are not supported.
    """
    rows = [_sums(piece, tensor) for piece, tensor in parts if piece.numel]
    table = iter(torch.stack(rows).cpu().numpy().astype(np.uint64).tolist() if rows else ())
    found = [next(table) if piece.numel else (0, 0) for piece, _ in parts]
    return [ExactHash(in_place=in_place, anywhere=anywhere) for in_place, anywhere in found]


def _sums(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    # Torch's int64 sums and products wrap around, so they are those modulo 2**64.
    bits = _bits(tensor.detach().reshape(-1))
    in_place = [
        ((bits[offset : offset + len(rows) * len(columns)].view(len(rows), -1) * columns).sum(1) * rows).sum()
        for offset, rows, columns in _weights(piece.shape, piece.start, piece.size, piece.run, bits.device)
    ]
    return torch.stack([torch.stack(in_place).sum(), mix_words(bits).sum()])


def _bits(flat: torch.Tensor) -> torch.Tensor:
    whole = flat if flat.dtype is torch.bool else flat.view(_INTEGERS[flat.element_size()])
    return whole.to(torch.int64)


def mix_words(bits: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's hash for each int64 number. torch shifts int64 arithmetically, so the sign bits are masked."""

    def shift(words: torch.Tensor, count: int) -> torch.Tensor:
        return (words >> count) & ((1 << (64 - count)) - 1)

    mixed = bits + _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ shift(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ shift(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ shift(mixed, 31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


@lru_cache(maxsize=8192)
def _weights(
    shape: Ints, start: Ints, size: Ints, run: tuple[int, int] | None, device: torch.device
) -> tuple[tuple[int, torch.Tensor, torch.Tensor], ...]:
    """Return offset, row weights and column weights for each rectangle."""

    def odd(hashes: Hashes) -> torch.Tensor:
        return torch.from_numpy((hashes | np.uint64(1)).view(np.int64)).to(device)  # odd, so that no bit is lost

    rectangles = rectangles_of(shape, start, size, run)
    return tuple((each.offset, odd(hash_rows(each.rows)), odd(hash_columns(each.columns))) for each in rectangles)
