"""`BatchingVerdict`: the result of `check_batching`."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.arrangements.arrangement import Kind
from equivcheck.oracle.verdict.description import axes_in_words, error_in_words, heading
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import wrap_lines
from equivcheck.worlds.trace.differences import Divergence

_MOST = 6
"""Maximum number of arrangements in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrangementResult:
    """Comparison of one arrangement with the whole batch."""

    name: str
    """Phrase for the arrangement, such as ``2 even microbatches``."""
    kind: Kind
    """How the arrangement changes the batch."""
    error: float = 0.0
    """Largest error relative to its tolerance; infinity if a value is NaN."""
    divergence: Divergence | None = None
    """First difference; None if the arrangement agrees."""
    failure: str = ""
    """Text of the exception that the step raised; empty if it raised none."""
    is_hung: bool = False
    """Whether the ranks hung and were stopped."""
    ratio: float = 1.0
    """Norm of the first differing gradient, divided by its norm for the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingVerdict(Judgement):
    """Result of `check_batching`: EQUIVALENT, DIVERGED, CRASHED or INCONCLUSIVE, with evidence."""

    name: str = ""
    """The step's name; empty if it has none."""
    counts: tuple[int, ...] = ()
    """Number of counted tokens in each example."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axis names and sizes; empty if the step ran on one device only."""
    precision: str = ""
    """The coarsest element type that the step uses."""
    results: tuple[ArrangementResult, ...] = ()
    """Result for each arrangement, in the order in which they ran."""
    cause: str = ""
    """How the step weighs examples, or how examples influence each other. The cause reproduces every arrangement.
    Empty if unknown."""
    weights: str = ""
    """Each example's weight in the first differing arrangement, and in the whole batch. Empty if no weights explain it."""
    normaliser: str = ""
    """Rule for how examples weigh in the whole batch; empty if no known rule fits."""
    read: tuple[str, ...] = ()
    """How the batch was read: one phrase for each tensor."""
    notes: tuple[str, ...] = ()
    """Further remarks, one sentence each."""

    def describe(self) -> str:
        """Return the verdict as text, wrapped to the terminal's width. `print(verdict)` prints the same text."""
        return "\n".join(wrap_lines([self._heading(), *(f"  {line}" for line in self._evidence())]))

    def _heading(self) -> str:
        axes = axes_in_words(self.mesh)
        where = f"one device and {axes} in {self.world}" if axes else "one device"
        return heading(self.outcome.value, self.name, "step", self._about(), self.precision, where)

    def _about(self) -> str:
        tokens = f" ({', '.join(map(str, self.counts))} counted tokens)" if any(number != 1 for number in self.counts) else ""
        return f"{count(len(self.results), 'arrangement')} of {count(len(self.counts), 'example')}{tokens}"

    def _evidence(self) -> list[str]:
        first = next((result for result in self.results if result.divergence is not None), None)
        lines = []
        if first is not None and first.divergence is not None and self.outcome is Outcome.DIVERGED:
            tensor = "" if first.divergence.tensor == "loss" else f" of {first.divergence.tensor}"
            size = f", norm x {first.ratio:.6g}" if first.ratio != 1.0 else ""
            words = f"{first.name}: {first.divergence.phase.value}{tensor}{size}"
            lines += [f"first: {words}", f"       differs ({error_in_words(first.divergence)})"]
        elif self.reason:
            lines.append(self.reason)
        lines += [f"why:   {self.cause}"] if self.cause else []
        lines += [f"       {self.weights}"] if self.weights else []
        wrong = [result.name for result in self.results if result.divergence is not None and result is not first]
        right = [result.name for result in self.results if result.divergence is None and not result.failure]
        failed = [result for result in self.results if result.failure]
        lines += [f"also:  {_listed(wrong)}"] if wrong else []
        lines += [f"fails: {_listed([result.name for result in failed])}: {failed[0].failure}"] if failed else []
        lines += [f"agree: {_listed(right)}"] if right else []
        lines += [f"loss:  {self.normaliser}"] if self.normaliser else []
        lines += [f"read:  {'; '.join(self.read)}"] if self.read else []
        return [*lines, *(f"note:  {note}" for note in self.notes)]


def _listed(names: list[str]) -> str:
    rest = len(names) - _MOST
    return "; ".join(names[:_MOST]) + (f"; and {rest} more" if rest > 0 else "")
