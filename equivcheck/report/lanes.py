"""Arranges collective calls by rank in columns. Calls that a group makes together share a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equivcheck.layouts.base.expected_calls.communication import axes_of
from equivcheck.scenario import Mesh
from equivcheck.worlds.call import BEFORE_STEPS, Call

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
"""Letter for each kind of call; ``?`` for others."""
MESSAGES = ("send", "recv")
"""Calls between two ranks, which no group issues together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCall:
    """One rank's collective call, with its column in a drawing."""

    rank: int
    """Rank that made the call."""
    column: int
    """Column, from 0. Calls that a group makes together share a column."""
    call: Call
    """The recorded call."""
    group: int
    """The group's number, in order of first use."""
    is_unmatched: bool
    """Whether some other ranks in the group did not make this call."""

    @property
    def letter(self) -> str:
        """Letter for the kind of call, such as all-reduce."""
        return LETTERS.get(self.call.op.partition(".")[0], "?")

    @property
    def meeting(self) -> tuple[int, tuple[int, ...], str]:
        """Key that is equal for all ranks' calls in one collective."""
        return self.column, self.call.ranks, self.call.op


def group_names(calls: Sequence[Sequence[Call]], mesh: Mesh) -> tuple[str, ...]:
    """Return the names of the process groups in the calls, in order of first use. Names consist of mesh axes."""
    return tuple(dict.fromkeys(axes_of(call.ranks, mesh) for rank in calls for call in rank))


def used_letters(calls: Sequence[Sequence[Call]]) -> list[tuple[str, str]]:
    """Return the letters in a drawing, each with the kind of call for which it stands."""
    used = dict.fromkeys(call.op.partition(".")[0] for rank in calls for call in rank)
    return [(LETTERS.get(op, "?"), op) for op in used]


def placed_steps(calls: Sequence[Sequence[Call]], mesh: Mesh) -> list[tuple[list[int], list[PlacedCall]]]:
    """Return pairs (step numbers, calls with their columns), for the setup and for each step.

    Consecutive steps with equal calls share a pair.
    """
    found: list[tuple[list[int], list[PlacedCall]]] = []
    names = group_names(calls, mesh)
    for step in sorted({call.step for rank in calls for call in rank}):
        placed = _placed([[call for call in rank if call.step == step] for rank in calls], names, mesh)
        if found and list(map(_key, found[-1][1])) == list(map(_key, placed)):
            found[-1][0].append(step)
        else:
            found.append(([step], placed))
    return found


def _placed(calls: list[list[Call]], names: tuple[str, ...], mesh: Mesh) -> list[PlacedCall]:
    placed = [
        PlacedCall(rank=rank, column=column, call=call, group=names.index(axes_of(call.ranks, mesh)), is_unmatched=False)
        for rank, (issued, numbers) in enumerate(zip(calls, columns(calls), strict=True))
        for call, column in zip(issued, numbers, strict=True)
    ]
    together = Counter(one.meeting for one in placed)
    return [
        replace(one, is_unmatched=one.call.op not in MESSAGES and together[one.meeting] < len(one.call.ranks))
        for one in sorted(placed, key=lambda one: (one.column, one.rank))
    ]


def _key(one: PlacedCall) -> tuple[object, ...]:
    return one.rank, *one.meeting, one.call.shapes, one.is_unmatched


def steps_in_words(steps: Sequence[int]) -> str:
    """Return a text for step numbers: ``setup``, ``step 0`` or ``steps 1 to 3, each``."""
    if steps[0] == BEFORE_STEPS:
        return "setup"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, each"


def columns(calls: Sequence[Sequence[Call]]) -> list[list[int]]:
    """Return the column for each call on each rank. `calls` are each rank's calls.

    If several ranks make a call together, all get the first column that is free on each of these ranks.
    """
    found: list[list[int]] = [[] for _ in calls]
    while any(len(done) < len(issued) for done, issued in zip(found, calls, strict=True)):
        heads = {rank: calls[rank][len(done)] for rank, done in enumerate(found) if len(done) < len(calls[rank])}
        ready = _ready(heads)
        column = max((found[rank][-1] + 1 for rank in ready if found[rank]), default=0)
        for rank in ready:
            found[rank].append(column)
    return found


def _ready(heads: dict[int, Call]) -> list[int]:
    """Return the ranks that make the next call: a whole group, or else one rank, for messages and faults."""
    for call in heads.values():
        members = [rank for rank in call.ranks if rank in heads and heads[rank].ranks == call.ranks]
        if len(members) == len(call.ranks) and len({heads[rank].op for rank in members}) == 1:
            return members
    alone = [rank for rank, call in heads.items() if call.peer is not None]
    return [alone[0] if alone else next(iter(heads))]
