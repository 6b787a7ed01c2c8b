"""What `check_operation` returns: a row for each placement."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.description import of_divergence, of_ranks, shortened
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.programs.operation_check.run import Placements
from equivcheck.system.printable import printable

REFUSED = "refused"
"""What UNSUPPORTED is called in the table: every rank raises, and says what it does not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow(Judgement):
    """What came of one placement of the inputs.

    EQUIVALENT, DIVERGED, UNSUPPORTED (every rank refuses it clearly), CRASHED, HUNG or INCONCLUSIVE.
    """

    placements: Placements
    """For each tensor, a placement for each axis; None for a plain tensor."""
    outputs: tuple[str, ...] = ()
    """How the results lie on the mesh; empty where there are none."""
    seed: int = 0
    """Of the inputs."""

    @property
    def is_refused(self) -> bool:
        """Whether every rank refused it clearly."""
        return self.outcome is Outcome.UNSUPPORTED

    @property
    def said(self) -> str:
        """The outcome, in a word."""
        return REFUSED if self.is_refused else self.outcome.value

    def evidence(self) -> list[str]:
        """What is known of a row that is not equivalent, a line each."""
        if self.divergence is not None:
            return of_divergence(self.divergence, self.followers, self.num_unnamed)
        return of_ranks(self.failure) if self.failure is not None else [shortened(self.reason)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """An operation under some placements of its inputs."""

    name: str
    """What the operation is called."""
    inputs: tuple[str, ...]
    """What the tensors are called that it takes."""
    mesh: tuple[tuple[str, int], ...]
    """Names and sizes of the axes."""
    world: str
    """Where the ranks ran."""
    rows: tuple[PlacementRow, ...]
    """In the order of placements, seed by seed."""
    seconds: float = 0.0
    """Time of the whole check."""

    @property
    def equivalent(self) -> tuple[PlacementRow, ...]:
        """The rows that give what one device gives."""
        return tuple(row for row in self.rows if row.outcome is Outcome.EQUIVALENT)

    @property
    def refused(self) -> tuple[PlacementRow, ...]:
        """The rows that every rank refuses clearly."""
        return tuple(row for row in self.rows if row.is_refused)

    @property
    def wrong(self) -> tuple[PlacementRow, ...]:
        """The rows that are wrong.

        With other values or gradients, errors of some ranks alone or that do not say what is unsupported, or ranks that hang.
        """
        return tuple(row for row in self.rows if row.outcome.is_finding)

    def assert_equivalent(self, *, refused: bool = True) -> None:
        """Raise `NotEquivalent` unless every placement gives what one device gives.

        Placements that every rank refuses clearly pass, unless all are refused, or `refused` is False.
        """
        num_passed = len(self.equivalent) + (len(self.refused) if refused else 0)
        if not self.equivalent or num_passed < len(self.rows):
            raise NotEquivalent(self.describe())

    def describe(self) -> str:
        """Counts, a table, and what is known of each placement that is wrong."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        counts = Counter(row.said for row in self.rows)
        heading = f"{self.name} on {axes}, in {self.world}: {', '.join(f'{number} {what}' for what, number in counts.items())}"
        lines = [heading, *(f"  {line}" for line in self._table())]
        for row in self.wrong:
            lines += ["", f"{self._in_words(row)}: {row.said}", *(f"  {line}" for line in row.evidence())]
        return "\n".join(map(printable, lines))

    def _in_words(self, row: PlacementRow) -> str:
        pairs = zip(self.inputs, row.placements, strict=True)
        seed = f", seed {row.seed}" if len({each.seed for each in self.rows}) > 1 else ""
        return ", ".join(f"{name} {_lies(lies)}" for name, lies in pairs) + seed

    def _table(self) -> list[str]:
        several = len({row.seed for row in self.rows}) > 1
        heads = (*(("seed",) if several else ()), *self.inputs, "outcome", "results", "why")
        body = [(*((str(row.seed),) if several else ()), *map(_lies, row.placements), *_cells(row)) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (heads, *body)
        ]


def _lies(placements: tuple[str, ...] | None) -> str:
    return "plain" if placements is None else " ".join(placements)


def _cells(row: PlacementRow) -> tuple[str, str, str]:
    return (
        row.said,
        "; ".join(row.outputs),
        "" if row.outcome is Outcome.EQUIVALENT else shortened(row.reason).removeprefix("step 0 "),
    )
