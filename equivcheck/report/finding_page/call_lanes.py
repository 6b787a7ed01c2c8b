"""Lanes as a drawing: each rank's calls in order. A call without all partners is marked."""

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
    """Calls in one step, or in several equal steps."""

    title: str
    """Title with its steps."""
    calls: tuple[PlacedCall, ...]
    """Calls on all ranks."""
    links: tuple[tuple[int, int, int], ...]
    """Lines between group members: x, first y, last y."""
    ranks: int
    """Lane count."""
    left_out: int
    """Number of calls that are not drawn, because there is no room."""

    @property
    def width(self) -> int:
        """Width in SVG units."""
        return LEFT + COLUMN * (1 + max((one.column for one in self.calls), default=0)) + 6

    @property
    def height(self) -> int:
        """Height in SVG units."""
        return TOP + self.ranks * LANE + 4

    @property
    def num_unmatched(self) -> int:
        """Number of calls that only some members of a group have made."""
        return sum(one.is_unmatched for one in self.calls)


def lane_blocks(calls: Sequence[Sequence[Call]], mesh: Mesh) -> list[LaneBlock]:
    """Build a block for each step, setup first. Consecutive equal steps share one."""
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
