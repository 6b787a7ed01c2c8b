"""Lanes: each rank's calls in order. Calls that a group issues together share a column, and missing partners are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from equivcheck.layouts.base.expected_calls.communication import axes_of
from equivcheck.report.lanes import LETTERS, columns, group_names
from equivcheck.scenario import Mesh
from equivcheck.worlds.call import BEFORE_STEPS, Call

LEFT, TOP, COLUMN, LANE = 62, 8, 30, 34
MAX_COLUMNS = 60
"""Most columns per step. Later calls are counted."""
MAX_CALLS = 900
"""Most calls over all steps, because the page has no room for more."""
_MESSAGES = ("send", "recv")
"""Calls between two ranks, which no group issues together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBox:
    """A rank's call as a box."""

    x: int
    """Left edge."""
    y: int
    """Upper edge."""
    letter: str
    """Letter for its kind."""
    group: int
    """Group number, in order of first use."""
    is_unmatched: bool
    """Whether other members of its group did not issue it."""
    words: str
    """Description of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBlock:
    """Calls in one step, or in several equal steps."""

    title: str
    """Title with its steps."""
    boxes: tuple[CallBox, ...]
    """Boxes for all ranks."""
    links: tuple[tuple[int, int, int], ...]
    """Lines between group members: x, first y, last y."""
    ranks: int
    """Number of lanes."""
    width: int
    """Width in SVG units."""
    left_out: int
    """Calls without room."""

    @property
    def height(self) -> int:
        """Height in SVG units."""
        return TOP + self.ranks * LANE + 4

    @property
    def num_unmatched(self) -> int:
        """Calls that only part of a group has issued."""
        return sum(box.is_unmatched for box in self.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A call with its column."""

    rank: int
    """Rank that issued it."""
    column: int
    """Column, from 0."""
    call: Call
    """The call."""
    group: int
    """Group number, in order of first use."""
    is_unmatched: bool
    """Whether other members of its group did not issue it."""


def lane_blocks(calls: Sequence[Sequence[Call]], mesh: Mesh) -> list[LaneBlock]:
    """A block per step, setup first. Consecutive equal steps share one."""
    names, found, room = group_names(calls, mesh), list[tuple[list[int], list[Placed]]](), MAX_CALLS
    for step in sorted({call.step for rank in calls for call in rank}):
        of_step = [[call for call in rank if call.step == step] for rank in calls]
        placed = list(_placed(of_step, lambda call: names.index(axes_of(call.ranks, mesh))))
        if found and _key(found[-1][1]) == _key(placed):
            found[-1][0].append(step)
        else:
            found.append(([step], placed))
    blocks = []
    for steps, placed in found:
        shown = [one for one in placed if one.column < MAX_COLUMNS][: max(0, room)]
        room -= len(shown)
        blocks.append(_block(_title(steps), shown, len(placed) - len(shown), len(calls)))
    return blocks


def letters(calls: Sequence[Sequence[Call]]) -> list[tuple[str, str]]:
    """Letters with their kinds of calls."""
    used = dict.fromkeys(call.op.partition(".")[0] for rank in calls for call in rank)
    return [(LETTERS.get(op, "?"), op) for op in used]


def _placed(calls: list[list[Call]], group_of: Callable[[Call], int]) -> Iterator[Placed]:
    """Yield calls by column."""
    places = [
        (column, rank, call)
        for rank, (of_rank, numbers) in enumerate(zip(calls, columns(calls), strict=True))
        for call, column in zip(of_rank, numbers, strict=True)
    ]
    together: dict[tuple[int, tuple[int, ...], str], int] = {}
    for column, _, call in places:
        together[column, call.ranks, call.op] = together.get((column, call.ranks, call.op), 0) + 1
    for column, rank, call in sorted(places, key=lambda place: place[:2]):
        is_unmatched = call.op not in _MESSAGES and together[column, call.ranks, call.op] < len(call.ranks)
        yield Placed(rank=rank, column=column, call=call, group=group_of(call), is_unmatched=is_unmatched)


def _key(placed: list[Placed]) -> list[tuple[object, ...]]:
    return [(one.rank, one.column, one.call.op, one.call.ranks, one.call.shapes, one.is_unmatched) for one in placed]


def _title(steps: list[int]) -> str:
    if steps[0] == BEFORE_STEPS:
        return "Setup"
    return f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}, each"


def _block(title: str, placed: list[Placed], left_out: int, ranks: int) -> LaneBlock:
    boxes = tuple(
        CallBox(
            x=LEFT + one.column * COLUMN,
            y=TOP + one.rank * LANE,
            letter=LETTERS.get(one.call.op.partition(".")[0], "?"),
            group=one.group,
            is_unmatched=one.is_unmatched,
            words=f"rank {one.rank}, {one.call.stage.value}: {one.call.describe()}",
        )
        for one in placed
    )
    width = LEFT + COLUMN * (1 + max((one.column for one in placed), default=0)) + 6
    return LaneBlock(title=title, boxes=boxes, links=_links(placed), ranks=ranks, width=width, left_out=left_out)


def _links(placed: list[Placed]) -> tuple[tuple[int, int, int], ...]:
    """Lines from the first to the last member of each group with a common call."""
    ends: dict[tuple[int, tuple[int, ...], str], list[int]] = {}
    for one in placed:
        if one.call.op not in _MESSAGES and not one.is_unmatched:
            ends.setdefault((one.column, one.call.ranks, one.call.op), []).append(one.rank)
    middle = COLUMN // 2 - 2
    return tuple(
        (LEFT + column * COLUMN + middle, TOP + ranks[0] * LANE + 13, TOP + ranks[-1] * LANE + 13)
        for (column, _, _), ranks in ends.items()
        if len(ranks) > 1
    )
