"""`UserVerdict`: the result from `check_training`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.description import axes_in_words, divergence_lines, heading
from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.system.printable import wrap_lines
from equivcheck.user.lazy_diagnosis import LazyDiagnosis
from equivcheck.user.messages.failure_text import failure_lines, stack_lines
from equivcheck.user.traces.measures import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class UserVerdict(Judgement):
    """Result from `check_training`: EQUIVALENT, DIVERGED, CRASHED, HUNG or INCONCLUSIVE, with evidence."""

    name: str = ""
    """The training's name; empty if it has none."""
    mesh: tuple[tuple[str, int], ...]
    """Axis names and sizes."""
    precision: str
    """The coarsest element type in the single-device run. It sets the tolerances.

    With `precision=` given: the type in which the training computes, and the types to which it rounds.
    """
    split: str = ""
    """With `batch_splits=`: how the batches were split over data ranks. Empty for equal parts."""
    unread: tuple[str, ...] = ()
    """Optimizer state that was not compared because no rank could read it."""
    notes: tuple[str, ...] = ()
    """Remarks about the run, and about errors it cannot show, one sentence each."""
    measures: Measures | None = None
    """Loss and gradient norm at the first step, and collective calls and bytes in a step. None if ranks did not finish."""
    diagnosis: LazyDiagnosis = field(default_factory=LazyDiagnosis, repr=False, compare=False)
    """Search for the cause. It runs when the text, or one of the properties below, is first read."""

    @property
    def cause(self) -> str:
        """Why the training diverged: a fault that, repeated on one device, reproduces all values on the ranks.

        Or a fault without which the ranks agree with one device, such as a missing sum. Empty if neither is found.
        """
        return self.diagnosis.result.cause

    @property
    def kinds(self) -> tuple[Cause, ...]:
        """Codes for the faults in `cause`. There are several if several faults fit."""
        return self.diagnosis.result.kinds

    @property
    def where(self) -> str:
        """First place at which the ranks differ: a module's input, output or gradient, or clipping. Empty if none is certain."""
        return self.diagnosis.result.where

    @property
    def types(self) -> str:
        """Result of the spmd_types type checker. Empty unless parameters have its types and ranks diverged or failed."""
        return self.diagnosis.result.types

    @property
    def hint(self) -> str:
        """Possible explanation, not proven, if no cause is known. Otherwise empty."""
        return self.diagnosis.result.hint

    @property
    def unfinished(self) -> str:
        """Failed part of the diagnosis, with its error. Empty if none failed."""
        return self.diagnosis.result.unfinished

    def describe(self, *, verbose: bool = False) -> str:
        """Return the verdict as text, wrapped to the terminal's width. With `verbose`, it has the failed ranks' stacks."""
        about = axes_in_words(self.mesh), self.precision, f"in {self.world}"
        first = heading(self.outcome.value, self.name, "training", *about)
        lines = [*self._evidence(), *((_MORE,) if self.failure is not None and not verbose else ())]
        stacks = () if self.failure is None or not verbose else stack_lines(self.failure)
        return "\n".join([*wrap_lines([first, *(f"  {line}" for line in lines)]), *(f"  {line}" for line in stacks)])

    def _evidence(self) -> list[str]:
        lines = [self._in_short()]
        if self.divergence is not None:
            lines = divergence_lines(self.divergence, self.followers, self.num_unnamed)
        elif self.failure is not None:
            lines = failure_lines(self.failure)
        found = self.diagnosis.result
        named = {"split": self.split, "why": found.cause or found.unexplained, "hint": found.hint}
        named |= {"where": found.where, "types": found.types}
        lines += [f"{name + ':':6} {text}" for name, text in named.items() if text]
        if self.unread:
            lines.append(f"not compared because no rank could read it: {_by_key(self.unread)}")
        return [*lines, *(f"note:  {note}" for note in (*self.notes, found.unfinished) if note)]

    def _error(self) -> NotEquivalent:
        """Return an error that contains the diagnosis only after it is read.

        Hypothesis raises many such errors while it shrinks, and reads few.
        """
        return NotEquivalent(replace(self, diagnosis=LazyDiagnosis()).describe(), self.describe)


def _by_key(names: tuple[str, ...]) -> str:
    """List optimizer state by key, such as ``exp_avg of 4 parameters``. If only one parameter has a key, give the full name."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name in names:
        owners[name.rpartition("/")[2]].append(name)
    return ", ".join(own[0] if len(own) == 1 else f"{key} of {len(own)} parameters" for key, own in owners.items())


_MORE = "more:  verdict.describe(verbose=True) or `equivcheck matrix -v` has all stacks"
