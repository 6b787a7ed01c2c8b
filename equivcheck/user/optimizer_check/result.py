"""`OptimizerVerdict`: the result from `check_optimizer`."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.description import axes_in_words, divergence_lines, heading
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import wrap_lines
from equivcheck.user.messages.failure_text import failure_lines
from equivcheck.user.optimizer_check.cases import OptimizerCase

_MOST = 4
"""Maximum number of cases that a line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One `check_optimizer` case with its outcome."""

    case: OptimizerCase
    """The case: parameters, gradients, and how ranks hold them."""
    outcome: Outcome
    """Outcome of the check."""
    reason: str
    """Reason for the outcome, in one sentence; empty if it is EQUIVALENT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerVerdict(Judgement):
    """Result from `check_optimizer`, with the smallest differing case."""

    name: str = ""
    """The optimizer's name; empty if it has none."""
    mesh: tuple[tuple[str, int], ...]
    """Axis names and sizes."""
    results: tuple[CaseResult, ...] = ()
    """All checked cases, in order."""
    case: OptimizerCase | None = None
    """The smallest case that differs or fails; None if all agree."""
    cause: str = ""
    """The mistake that, made on one device, gives all values on the ranks. Empty if none is known."""

    def describe(self) -> str:
        """Return the verdict as text, wrapped to the terminal's width. `print(verdict)` prints the same text."""
        about = axes_in_words(self.mesh), count(len(self.results), "case"), f"in {self.world}"
        first = heading(self.outcome.value, self.name, "optimizer", *about)
        return "\n".join(wrap_lines([first, *(f"  {line}" for line in self._evidence())]))

    def _evidence(self) -> list[str]:
        lines = [self._in_short()]
        if self.divergence is not None:
            lines = divergence_lines(self.divergence, self.followers, self.num_unnamed)
        elif self.failure is not None:
            lines = failure_lines(self.failure)
        lines += [f"case:  {self.case}"] if self.case is not None else []
        lines += [f"why:   {self.cause}"] if self.cause else []
        wrong = [result for result in self.results if result.outcome.is_finding]
        if wrong:
            placed = dict.fromkeys(result.case.placed.value for result in wrong)
            lines.append(f"wrong: {len(wrong)} of {count(len(self.results), 'case')} ({', '.join(placed)})")
        return lines
