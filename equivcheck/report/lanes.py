"""Calls by rank in columns. Calls that a group issues together share a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equivcheck.layouts.base.expected_calls.communication import axes_of
from equivcheck.scenario import Mesh
from equivcheck.worlds.call import Call

LETTERS = {
    "all_gather": "G",
    "reduce_scatter": "S",
    "all_reduce": "R",
    "broadcast": "B",
    "all_to_all": "X",
    "scatter": "C",
    "gather": "H",
    "reduce": "D",
    "barrier": "|",
    "send": ">",
    "recv": "<",
}
"""Letter per kind of call; ``?`` for others."""
IDLE = " ."


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Calls in one step, or in several equal steps."""

    steps: tuple[int, ...]
    """Steps with these calls."""
    ranks: tuple[tuple[str, ...], ...]
    """Two characters per rank and column: letters for the kind of call and its group, or `IDLE`."""


def group_names(calls: Sequence[Sequence[Call]], mesh: Mesh) -> tuple[str, ...]:
    """Names of the groups that communicate, in order of first use."""
    return tuple(dict.fromkeys(axes_of(call.ranks, mesh) for rank in calls for call in rank))


def lanes(calls: Sequence[Sequence[Call]], mesh: Mesh) -> Iterator[Lanes]:
    """Calls per step, beginning with those before the first step. Consecutive equal steps share one entry."""
    letters = {name: chr(ord("a") + number % 26) for number, name in enumerate(group_names(calls, mesh))}
    found: Lanes | None = None
    for step in sorted({call.step for rank in calls for call in rank}):
        of_step = [[call for call in rank if call.step == step] for rank in calls]
        cells = _cells(of_step, [[_cell(call, mesh, letters) for call in rank] for rank in of_step])
        if found is not None and found.ranks == cells:
            found = Lanes(steps=(*found.steps, step), ranks=cells)
            continue
        if found is not None:
            yield found
        found = Lanes(steps=(step,), ranks=cells)
    if found is not None:
        yield found


def _cell(call: Call, mesh: Mesh, letters: dict[str, str]) -> str:
    return LETTERS.get(call.op.partition(".")[0], "?") + letters[axes_of(call.ranks, mesh)]


def _cells(calls: list[list[Call]], cells: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    placed = columns(calls)
    width = max((column for rank in placed for column in rank), default=-1) + 1
    rows = []
    for rank, found in enumerate(placed):
        row = [IDLE] * width
        for number, column in enumerate(found):
            row[column] = cells[rank][number]
        rows.append(tuple(row))
    return tuple(rows)


def columns(calls: Sequence[Sequence[Call]]) -> list[list[int]]:
    """Column per call and rank. A group's common call waits for its last member."""
    found: list[list[int]] = [[] for _ in calls]
    while any(len(done) < len(issued) for done, issued in zip(found, calls, strict=True)):
        heads = {rank: calls[rank][len(done)] for rank, done in enumerate(found) if len(done) < len(calls[rank])}
        ready = _ready(heads)
        column = max((found[rank][-1] + 1 for rank in ready if found[rank]), default=0)
        for rank in ready:
            found[rank].append(column)
    return found


def _ready(heads: dict[int, Call]) -> list[int]:
    """Ranks with the next call: a whole group, or else one rank, for messages and faults."""
    for call in heads.values():
        members = [rank for rank in call.ranks if rank in heads and heads[rank].ranks == call.ranks]
        if len(members) == len(call.ranks) and len({heads[rank].op for rank in members}) == 1:
            return members
    alone = [rank for rank, call in heads.items() if call.peer is not None]
    return [alone[0] if alone else next(iter(heads))]
