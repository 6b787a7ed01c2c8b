"""Tables with two recorded runs' samples, by ranks and steps, and samples in one run only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from equivcheck.recording.compare.compare import Comparison
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.trace import RecordedStep
from equivcheck.report.recording_page.grid import UNSEEN, Cell
from equivcheck.report.recording_page.tables import MAX_RANKS, Row, Table, shown_steps, step_names
from equivcheck.scenario.scenario import count

_MAX_LINES = 20
"""Maximum lines about samples that only one run has."""


def sample_tables(compared: Comparison) -> Iterator[Table]:
    """Yield a table for each run with samples: how many samples each rank had at each step."""
    runs = compared.facts.runs
    steps, _ = shown_steps(compared)
    known = [[_samples(run, step) for step in steps] for run in runs]
    for run, own, others in zip(runs, known, known[::-1], strict=True):
        if not any(own):
            continue
        rows = tuple(
            Row(name=f"rank {rank}", cells=tuple(map(_cell, (_of_rank(run, step, rank) for step in steps), others)))
            for rank in range(min(len(run.ranks), MAX_RANKS))
        )
        left = len(run.ranks) - len(rows)
        note = f"{count(left, 'more rank')} of {run.name} not shown." if left else ""
        yield Table(name=f"Samples of {run.name}", corner="rank", columns=step_names(steps), rows=rows, note=note)


def _of_rank(run: RecordedRun, step: int, rank: int) -> RecordedStep | None:
    return run.records[step][rank] if step in run.records else None


def _samples(run: RecordedRun, step: int) -> set[int]:
    """Return the samples on all ranks."""
    return {sample for record in run.records.get(step, ()) for sample in _flat(record)}


def _flat(step: RecordedStep) -> list[int]:
    return [sample for microbatch in step.samples for sample in microbatch]


def _cell(step: RecordedStep | None, elsewhere: Collection[int]) -> Cell:
    own = [] if step is None else _flat(step)
    if step is None or not (own or step.num_backwards):
        return UNSEEN
    title = (
        f"{count(len(own), 'sample')} in {count(len(step.samples), 'microbatch')}, {count(step.num_backwards, 'backward pass')}"
    )
    missing = sum(sample not in elsewhere for sample in own) if elsewhere else 0
    if missing:
        return Cell(style="differs", text=f"✗ {len(own)}, {missing} only here", title=title)
    return Cell(style="same" if elsewhere else "unseen", text=f"{'✓ ' if elsewhere else ''}{len(own)}", title=title)


def sample_lines(compared: Comparison) -> list[str]:
    """Return a line for each sample that only one run has: step, rank and row."""
    first, second = compared.facts.runs
    found = [*_lines(first, second), *_lines(second, first)]
    left = len(found) - _MAX_LINES
    return [*found[:_MAX_LINES], *([f"and {count(left, 'more place')}"] if left > 0 else [])]


def _lines(run: RecordedRun, other: RecordedRun) -> Iterator[str]:
    for step in (step for step in run.steps if step in other.records):
        elsewhere = _samples(other, step)
        for rank, record in enumerate(run.records[step] if elsewhere else ()):
            for number, microbatch in enumerate(record.samples):
                rows = [row for row, sample in enumerate(microbatch) if sample not in elsewhere]
                if rows:
                    where = f"step {step}, rank {rank}, microbatch {number}, {_rows(rows)}"
                    yield f"only in {run.name}: {where} ({len(rows)} of {count(len(microbatch), 'sample')} not in {other.name})"


def _rows(rows: Sequence[int]) -> str:
    if len(rows) == 1:
        return f"row {rows[0]}"
    is_range = rows[-1] - rows[0] == len(rows) - 1
    return f"rows {rows[0]} to {rows[-1]}" if is_range else f"rows {', '.join(map(str, rows))}"
