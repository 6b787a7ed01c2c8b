"""Result from `check_operation`: a row for each combination with input placements."""

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
    """Result from `check_operation` for one combination of input placements.

    The outcome is EQUIVALENT, DIVERGED, UNSUPPORTED (every rank refuses with a clear error), CRASHED, HUNG or INCONCLUSIVE.
    """

    placements: Placements
    """For each input tensor, a placement for each mesh axis; None for a plain tensor."""
    outputs: tuple[str, ...] = ()
    """The operation results' placements; empty if there are no results."""
    seed: int = 0
    """Seed from which the inputs were drawn."""

    @property
    def is_refused(self) -> bool:
        """Whether every rank refused these placements with a clear error."""
        return self.outcome is Outcome.UNSUPPORTED

    @property
    def outcome_name(self) -> str:
        """Outcome in one word, such as ``diverged``; ``refused`` stands for UNSUPPORTED."""
        return REFUSED if self.is_refused else self.outcome.value

    def evidence(self) -> list[str]:
        """Return lines about this row's divergence or failure. If it has neither, return the reason for its outcome."""
        if self.divergence is not None:
            return divergence_lines(self.divergence, self.followers, self.num_unnamed)
        return rank_lines(self.failure) if self.failure is not None else [shorten_to_line(self.reason)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """Result from `check_operation`, with a row for each combination of input placements."""

    name: str
    """The checked function's name."""
    inputs: tuple[str, ...]
    """Input tensors' names."""
    mesh: tuple[tuple[str, int], ...]
    """Name and size for each mesh axis."""
    world: str
    """World in which ranks ran."""
    rows: tuple[PlacementRow, ...]
    """One row for each combination of placements, first for the first seed."""
    seconds: float = 0.0
    """Duration of the check in seconds."""

    @property
    def equivalent(self) -> tuple[PlacementRow, ...]:
        """Rows in which ranks compute the same as one device."""
        return tuple(row for row in self.rows if row.outcome is Outcome.EQUIVALENT)

    @property
    def refused(self) -> tuple[PlacementRow, ...]:
        """Rows whose placements every rank refused with a clear error."""
        return tuple(row for row in self.rows if row.is_refused)

    @property
    def wrong(self) -> tuple[PlacementRow, ...]:
        """Rows with an error in the operation: DIVERGED, CRASHED or HUNG.

        The error is a wrong value or gradient, an exception on some ranks only, an exception without a clear refusal, or a hang.
        """
        return tuple(row for row in self.rows if row.outcome.is_finding)

    def assert_equivalent(self, *, refused: bool = True) -> None:
        """Raise `NotEquivalent` unless ranks compute the same as one device under each placement.

        Refused placements pass, unless all placements are refused or `refused` is False.
        """
        num_passed = len(self.equivalent) + (len(self.refused) if refused else 0)
        if not self.equivalent or num_passed < len(self.rows):
            raise NotEquivalent(self.describe())

    def describe(self) -> str:
        """Return the result as text: counts, a table with all placements, and the evidence for each error."""
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
