"""Numbers a rank's collectives on each group and compares them with the calls of the first member."""

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
"""Cached call digests; a training issues the same calls in each step."""


class Issued(NamedTuple):
    """One call to a collective on one rank, recorded before gloo runs it."""

    op: str
    """Operation as in `Call.op`."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes as in `Call.shapes`."""
    dtypes: tuple[object, ...]
    """Element types, one for each tensor."""
    root: int | None = None
    """The root's global rank; None if the call has none."""
    sized: bool = True
    """Whether all ranks in the group must pass equally many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Two ranks called different collectives as the n-th call on the same group.

    The rank that finds the mismatch sends this object instead of the program's return value.
    """

    calls: tuple[tuple[int, str], ...]
    """Global ranks in rising order, each with its call as written by `Call.describe`."""

    @property
    def text(self) -> str:
        """Both calls in one line, with their ranks."""
        (rank, call), (other, theirs) = self.calls
        return f"rank {rank} issued {call}, but rank {other} issued {theirs}"


class Journal:
    """Numbers one rank's collectives on each group, and writes them to a table that all ranks share."""

    def __init__(self, rank: int, table: Table) -> None:
        self._rank, self._table = rank, table
        self._run = 0
        self._groups: dict[tuple[str, tuple[int, ...]], tuple[bytes, list[int]]] = {}

    def begin(self) -> None:
        """Start a new run: number the calls on each group from 0 again.

        Groups in two runs may have the same name, so each run counts separately.
        """
        self._run += 1
        self._groups.clear()

    def mismatch(self, issued: Issued, group: str, ranks: tuple[int, ...]) -> Mismatch | None:
        """Number a call on a group, and write it to the table. `ranks` are the group's global ranks.

        Returns a `Mismatch` if another rank's call with this number is different, else None.
        """
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
    """Return a digest for all fields on which members must agree, and a description for the error with as many shapes as fit."""
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
