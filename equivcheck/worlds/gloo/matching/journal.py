"""A rank's collectives, numbered on each group, and held against what the first member to issue them said."""

from __future__ import annotations

import hashlib
import math
import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from equivcheck.worlds.call import Call
from equivcheck.worlds.gloo.matching.table import TOLD_BYTES, Entry, Table

KEPT_CALLS = 4096
"""Calls of which the digest is kept: a training issues the same ones in each step."""


class Issued(NamedTuple):
    """A collective as its rank issues it."""

    op: str
    """As in `Call.op`."""
    shapes: tuple[tuple[int, ...], ...]
    """As in `Call.shapes`."""
    dtypes: tuple[object, ...]
    """Element types of those tensors."""
    root: int | None = None
    """Global rank of the root; None where the call has none."""
    sized: bool = True
    """Whether all members must pass tensors of as many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Two ranks that have issued different collectives in the same place; what a rank sends instead of a value."""

    calls: tuple[tuple[int, str], ...]
    """Global ranks in their order, each with its call as `Call.describe` writes it."""

    @property
    def text(self) -> str:
        """One line."""
        (rank, call), (other, theirs) = self.calls
        return f"rank {rank} issued {call} where rank {other} issued {theirs}"


class Journal:
    """One rank's; a table is shared by ranks that all begin the same runs."""

    def __init__(self, rank: int, table: Table) -> None:
        self._rank, self._table = rank, table
        self._run = 0
        self._groups: dict[tuple[str, tuple[int, ...]], tuple[bytes, list[int]]] = {}

    def begin(self) -> None:
        """Number the calls of another run from 0, on groups whose names may have been used before."""
        self._run += 1
        self._groups.clear()

    def mismatch(self, issued: Issued, group: str, ranks: tuple[int, ...]) -> Mismatch | None:
        """Note a call on a group of these global ranks; not None if another member has issued something else in its place."""
        digest, count = self._group(group, ranks)
        index = count[0]
        count[0] += 1
        agree, told = _packed(issued)
        other = self._table.enter(Entry(digest, index, agree, self._rank, told))
        if other is None:
            return None
        first, theirs = other
        calls = {self._rank: _call(told, ranks, index), first: _call(theirs, ranks, index)}
        return Mismatch(calls=tuple((rank, calls[rank].describe()) for rank in sorted(calls)))

    def _group(self, name: str, ranks: tuple[int, ...]) -> tuple[bytes, list[int]]:
        found = self._groups.get((name, ranks))
        if found is None:
            found = self._groups[name, ranks] = _digest(f"{self._run} {name} {ranks}", 12), [0]
        return found


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


@lru_cache(maxsize=KEPT_CALLS)
def _packed(issued: Issued) -> tuple[bytes, bytes]:
    """What members must agree on, and what others may want to read, of as many tensors as there is room for."""
    shapes = tuple(map(tuple, issued.shapes))
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in issued.dtypes)
    sizes = tuple(map(math.prod, shapes)) if issued.sized else ()
    agree = _digest(repr((issued.op, dtypes if issued.sized else dtypes[:1], issued.root, sizes)), 16)
    while len(told := pickle.dumps((issued.op, shapes, "/".join(dict.fromkeys(dtypes)), issued.root))) > TOLD_BYTES:
        shapes = shapes[: len(shapes) // 2]
    return agree, told


def _call(told: bytes, ranks: tuple[int, ...], index: int) -> Call:
    op, shapes, dtype, root = pickle.loads(told)
    return Call(op=op, ranks=ranks, index=index, shapes=shapes, dtype=dtype, num_bytes=0, peer=root)
