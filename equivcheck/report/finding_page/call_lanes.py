"""Draws each rank's collective calls as a lane, in order. A call without all partners is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivcheck.report.lanes import MESSAGES, PlacedCall, placed_steps, steps_in_words
from equivcheck.scenario import Mesh
from equivcheck.worlds.call import Call

LEFT, TOP, COLUMN, LANE = 62, 8, 30, 34
MAX_COLUMNS = 60
"""Maximum number of columns per step. Later calls are only counted."""
MAX_CALLS = 900
"""Maximum number of calls over all steps, because the page has no room for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBlock:
    """Drawing with the collective calls in one step, or in several equal steps."""

    title: str
    """Title that names the steps."""
    calls: tuple[PlacedCall, ...]
    """The calls on all ranks, with their positions."""
    links: tuple[tuple[int, int, int], ...]
    """Lines between the ranks in a group: x, first y, last y."""
    ranks: int
    """How many lanes there are, one for each rank."""
    left_out: int
    """How many calls are not drawn, because there is no room."""

    @property
    def width(self) -> int:
        """The drawing's width in SVG units."""
        return LEFT + COLUMN * (1 + max((one.column for one in self.calls), default=0)) + 6

    @property
    def height(self) -> int:
        """The drawing's height in SVG units."""
        return TOP + self.ranks * LANE + 4

    @property
    def num_unmatched(self) -> int:
        """How many calls were made by only some ranks in their group."""
        return sum(one.is_unmatched for one in self.calls)


def lane_blocks(calls: Sequence[Sequence[Call]], mesh: Mesh) -> list[LaneBlock]:
    """Build a drawing for the setup, then for each step. `calls` are each rank's calls.

    Consecutive steps with equal calls have one drawing.
    """
    blocks, room = [], MAX_CALLS
    for steps, placed in placed_steps(calls, mesh):
        shown = tuple([one for one in placed if one.column < MAX_COLUMNS][: max(0, room)])
        room -= len(shown)
        title, left_out = steps_in_words(steps).capitalize(), len(placed) - len(shown)
        blocks.append(LaneBlock(title=title, calls=shown, links=_links(shown), ranks=len(calls), left_out=left_out))
    return blocks


def _links(placed: Sequence[PlacedCall]) -> tuple[tuple[int, int, int], ...]:
    """Return lines from the first to the last member of each group that makes a call together."""
    ends: dict[tuple[int, tuple[int, ...], str], list[int]] = {}
    for one in placed:
        if one.call.op not in MESSAGES and not one.is_unmatched:
            ends.setdefault(one.meeting, []).append(one.rank)
    middle = COLUMN // 2 - 2
    return tuple(
        (LEFT + column * COLUMN + middle, TOP + ranks[0] * LANE + 13, TOP + ranks[-1] * LANE + 13)
        for (column, _, _), ranks in ends.items()
        if len(ranks) > 1
    )
