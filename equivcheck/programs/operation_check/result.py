"""`check_operation` results: a row for each placement."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.description import axes_in_words, divergence_lines, rank_lines, shorten_to_line
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.programs.operation_check.run import Placements
from equivcheck.system.printable import escape_unprintable

REFUSED = "refused"
"""Name of UNSUPPORTED in the table: every rank raises and names an unsupported placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow(Judgement):
    """Result for one combination of input placements.

    Its outcome is EQUIVALENT, DIVERGED, UNSUPPORTED (every rank refuses with a clear error), CRASHED, HUNG or INCONCLUSIVE.
    """

    placements: Placements
    """For each tensor, a placement for each axis; None for a plain tensor."""
    outputs: tuple[str, ...] = ()
    """Result placements; empty if there are no results."""
    seed: int = 0
    """Seed for the inputs."""

    @property
    def is_refused(self) -> bool:
        """Whether every rank refused the placements with a clear error."""
        return self.outcome is Outcome.UNSUPPORTED

    @property
    def outcome_name(self) -> str:
        """Return the outcome in one word; "refused" for UNSUPPORTED."""
        return REFUSED if self.is_refused else self.outcome.value

    def evidence(self) -> list[str]:
        """Return the evidence for a row that is not equivalent, one line each."""
        if self.divergence is not None:
            return divergence_lines(self.divergence, self.followers, self.num_unnamed)
        return rank_lines(self.failure) if self.failure is not None else [shorten_to_line(self.reason)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """Result for an operation under several input placements."""

    name: str
    """Operation name."""
    inputs: tuple[str, ...]
    """Tensor input names."""
    mesh: tuple[tuple[str, int], ...]
    """Axis names and sizes."""
    world: str
    """World in which ranks ran."""
    rows: tuple[PlacementRow, ...]
    """One row for each placement, seed by seed."""
    seconds: float = 0.0
    """Duration in seconds."""

    @property
    def equivalent(self) -> tuple[PlacementRow, ...]:
        """Return rows in which ranks compute the same as one device."""
        return tuple(row for row in self.rows if row.outcome is Outcome.EQUIVALENT)

    @property
    def refused(self) -> tuple[PlacementRow, ...]:
        """Return rows that every rank refuses with a clear error."""
        return tuple(row for row in self.rows if row.is_refused)

    @property
    def wrong(self) -> tuple[PlacementRow, ...]:
        """Return rows with findings.

        Values or gradients differ, only some ranks raise, an error does not say which placement is unsupported, or ranks hang.
        """
        return tuple(row for row in self.rows if row.outcome.is_finding)

    def assert_equivalent(self, *, refused: bool = True) -> None:
        """Raise `NotEquivalent` unless every placement computes the same as one device.

        Refused placements pass, unless all placements are refused or `refused` is False.
        """
        num_passed = len(self.equivalent) + (len(self.refused) if refused else 0)
        if not self.equivalent or num_passed < len(self.rows):
            raise NotEquivalent(self.describe())

    def describe(self) -> str:
        """Describe the result: counts, a table with all placements, and the evidence for each finding."""
        axes = axes_in_words(self.mesh)
        counts = Counter(row.outcome_name for row in self.rows)
        heading = f"{self.name} on {axes}, in {self.world}: {', '.join(f'{number} {what}' for what, number in counts.items())}"
        lines = [heading, *(f"  {line}" for line in self._table())]
        for row in self.wrong:
            lines += ["", f"{self._heading(row)}: {row.outcome_name}", *(f"  {line}" for line in row.evidence())]
        return "\n".join(map(escape_unprintable, lines))

    def _heading(self, row: PlacementRow) -> str:
        pairs = zip(self.inputs, row.placements, strict=True)
        seed = f", seed {row.seed}" if len({each.seed for each in self.rows}) > 1 else ""
        return ", ".join(f"{name} {_placements_text(own)}" for name, own in pairs) + seed

    def _table(self) -> list[str]:
        several = len({row.seed for row in self.rows}) > 1
        heads = (*(("seed",) if several else ()), *self.inputs, "outcome", "results", "why")
        body = [
            (*((str(row.seed),) if several else ()), *map(_placements_text, row.placements), *_cells(row)) for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (heads, *body)
        ]


def _placements_text(placements: tuple[str, ...] | None) -> str:
    return "plain" if placements is None else " ".join(placements)


def _cells(row: PlacementRow) -> tuple[str, str, str]:
    return (
        row.outcome_name,
        "; ".join(row.outputs),
        "" if row.outcome is Outcome.EQUIVALENT else shorten_to_line(row.reason).removeprefix("step 0 "),
    )
