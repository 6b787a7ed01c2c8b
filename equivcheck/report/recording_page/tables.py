"""Tables about two recorded runs: how gradients, parameters and other values agree at each step, and on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from equivcheck.recording.compare.compare import Comparison
from equivcheck.recording.compare.judge import CLUES
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.verdict import TensorDifference, relative_error
from equivcheck.recording.trace import Moment
from equivcheck.report.recording_page.grid import Cell, cell_of, error_text
from equivcheck.scenario.scenario import count
from equivcheck.worlds.trace.differences import Difference

_MAX_STEPS, _MAX_TENSORS, MAX_RANKS = 60, 400, 64
"""Sizes of tables. Larger tables would make the page slow to load."""
_STEPS_BEFORE = 5
"""Steps shown before the first divergent one, if there is no room for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of cells in a table about two recorded runs."""

    name: str
    """The row's heading."""
    cells: tuple[Cell, ...]
    """One cell for each column."""
    is_first: bool = False
    """Whether the first divergence is in this row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table about two recorded runs, with a heading for each column and for each row."""

    name: str
    """Description for screen readers."""
    corner: str
    """Heading above the row headings."""
    columns: tuple[str, ...]
    """Column headings."""
    rows: tuple[Row, ...]
    """Rows from top to bottom."""
    note: str = ""
    """Sentence about omitted rows or columns; empty if there are none."""


def steps_table(compared: Comparison) -> Table:
    """Build a table with a row for each moment (such as gradients) and a column for each step."""
    steps, note = shown_steps(compared)
    first = compared.verdict.first
    grouped: dict[tuple[int, Moment], list[TensorDifference]] = {}
    clues = (each for step in steps if step in compared.facts.steps for each in compared.clues(step))
    for each in (*(each for each in compared.tensors if each.moment not in CLUES), *clues):
        grouped.setdefault((each.step, each.moment), []).append(each)
    recorded = {run.name: _recorded_moments(run) for run in compared.facts.runs}
    rows = tuple(
        Row(
            name=moment.value,
            cells=tuple(_moment_cell(grouped.get((step, moment), []), (step, moment), recorded) for step in steps),
            is_first=first is not None and first.moment is moment,
        )
        for moment in Moment
        if moment is not Moment.ACCUMULATED  # read for causes only
    )
    return Table(name="Moments by steps", corner="moment", columns=step_names(steps), rows=rows, note=note)


def shown_steps(compared: Comparison) -> tuple[Sequence[int], str]:
    """Return the steps that get a column, and a sentence about the other steps.

    If there are many steps, those around the first difference are shown.
    """
    steps = sorted({step for run in compared.facts.runs for step in run.steps})
    first = compared.verdict.first
    place = 0 if first is None else steps.index(first.step)
    begin = max(0, min(place - _STEPS_BEFORE, len(steps) - _MAX_STEPS))
    shown = steps[begin : begin + _MAX_STEPS]
    left = len(steps) - len(shown)
    return shown, f"{count(left, 'more step')} not shown." if left else ""


def step_names(steps: Sequence[int]) -> tuple[str, ...]:
    """Return the column headings for these steps."""
    return tuple(f"step {step}" for step in steps)


def _recorded_moments(run: RecordedRun) -> frozenset[tuple[int, Moment]]:
    """Return the steps, with the points in them, that any rank has recorded."""
    found: set[tuple[int, Moment]] = set()
    for record in chain.from_iterable(run.records.values()):
        moments = {entry.moment for entry in record.entries}
        moments |= {Moment.SAMPLES} if any(record.samples) else set()
        moments |= {Moment.OUTPUT} if record.outputs else set()
        moments |= {Moment.LOSS} if record.losses else set()
        moments |= {Moment.NORM} if record.clips else set()
        found |= {(record.step, moment) for moment in moments}
    return frozenset(found)


def _moment_cell(
    found: Sequence[TensorDifference], key: tuple[int, Moment], recorded: Mapping[str, frozenset[tuple[int, Moment]]]
) -> Cell:
    owners = [name for name, moments in recorded.items() if key in moments]
    if not found and len(owners) == 1:
        return Cell(style="single", text=f"½ {owners[0]}", title=f"only {owners[0]} has it")
    return cell_of(found)


def tensors_table(compared: Comparison) -> Table:
    """Build a table with a row for each tensor and a column for each moment (such as gradients).

    It is about the first divergent step, or about the last step if all steps agree.
    """
    first = compared.verdict.first
    step = compared.tensors[-1].step if first is None else first.step
    tensors = [each for each in compared.tensors if each.moment not in CLUES]
    found = {(each.moment, each.tensor): each for each in tensors if each.step == step}
    moments = [moment for moment in Moment if any(key[0] is moment for key in found)]
    names = list(dict.fromkeys(name for _, name in found))
    shown = names if len(names) <= _MAX_TENSORS else _most_important(names, found)
    rows = tuple(
        Row(
            name=name,
            cells=tuple(cell_of([found[moment, name]] if (moment, name) in found else []) for moment in moments),
            is_first=first is not None and first.tensor == name,
        )
        for name in shown
    )
    left = len(names) - len(shown)
    note = f"{count(left, 'more tensor')} not shown." if left else ""
    columns = tuple(moment.value for moment in moments)
    return Table(name=f"Tensors at step {step}", corner="tensor", columns=columns, rows=rows, note=note)


def _most_important(names: Sequence[str], found: Mapping[tuple[Moment, str], TensorDifference]) -> list[str]:
    """Choose names for the rows: all tensors that differ, then tensors that agree, until there is no room.

    The order does not change.
    """
    wrong = {name for (_, name), each in found.items() if each.is_different}
    chosen = {*sorted(names, key=lambda name: name not in wrong)[:_MAX_TENSORS]}
    return [name for name in names if name in chosen]


def replica_tables(compared: Comparison) -> Iterator[Table]:
    """Yield a table for each run in which replicas disagree, with a row for each tensor and a column for each rank.

    They are about the first point in training at which any replicas disagree.
    """
    wrong = [each for each in compared.tensors if each.difference is Difference.RANKS_DISAGREE]
    for run in compared.facts.runs:
        rows = [row for each in wrong if each.moment is wrong[0].moment and (row := _replica_row(run, each)) is not None]
        if rows:
            ranks = range(min(len(run.ranks), MAX_RANKS))
            left = len(run.ranks) - len(ranks)
            note = f"{count(left, 'more rank')} not shown." if left else ""
            name = f"{run.name}, {wrong[0].moment.value}"
            yield Table(name=name, corner="tensor", columns=tuple(f"rank {rank}" for rank in ranks), rows=tuple(rows), note=note)


def _replica_row(run: RecordedRun, found: TensorDifference) -> Row | None:
    """Return a row with each rank's distance from the first rank that holds the same elements.

    None if no ranks of this run disagree.
    """
    tensor = run.tensors.get((found.step, found.moment, found.tensor))
    apart = {
        part.rank: part.value.distance(replicas[0].value)
        for replicas in (tensor.sketch.replicas if tensor is not None else ())
        for part in replicas
    }
    if all(distance <= found.allowed for distance in apart.values()):
        return None
    cells = (_replica_cell(apart.get(rank), found.allowed) for rank in range(min(len(run.ranks), MAX_RANKS)))
    return Row(name=f"step {found.step} {found.tensor}", cells=tuple(cells))


def _replica_cell(distance: float | None, allowed: float) -> Cell:
    if distance is None:
        return Cell(style="unseen", text="-", title="no replica")
    text = error_text(relative_error(distance, allowed))
    return Cell(style="same", text=f"✓ {text}") if distance <= allowed else Cell(style="differs", text=f"✗ {text}")
