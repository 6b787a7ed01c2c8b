"""Verdicts on two recorded runs, which are called A and B in their texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.recording.trace import Moment
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import wrap_lines
from equivcheck.worlds.trace.differences import Difference

_MAX_GROUPS = 5
"""Maximum further points in a step that `describe` shows."""
_MAX_LINES = 4
"""Maximum notes, and maximum gaps, in `describe`."""


def relative_error(distance: float, allowed: float) -> float:
    """Return `distance` divided by `allowed`. The result is 0 if both are 0, and infinity if only `allowed` is 0."""
    return distance / allowed if allowed else math.inf if distance else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Comparison of one value in two recorded runs, such as a tensor, a loss or a step's samples."""

    step: int
    """Step, from 0."""
    moment: Moment
    """Point in the step at which the value was recorded."""
    tensor: str
    """Name of a tensor or module; else ``samples``, ``loss`` or ``norm``."""
    difference: Difference
    """Kind of difference, such as a wrong value or a missing tensor."""
    distance: float = 0.0
    """Estimated 2-norm between both runs' values. If a run's replicas disagree, the 2-norm is between these."""
    norm: float = 0.0
    """The tensor's 2-norm in run A."""
    allowed: float = 0.0
    """Distance that rounding explains; 0 for integers."""
    eps: float = 0.0
    """Machine epsilon of the tensor's dtype; 0 for integers."""
    detail: str = ""
    """Clause with the values of both runs, such as ``shape (4, 3) in B, (4, 2) in A``."""
    is_undecided: bool = False
    """Whether the traces do not tell if the values differ, for example because both runs have NaN."""

    @property
    def error(self) -> float:
        """Distance divided by the allowed distance. It is 0 if both are 0."""
        return relative_error(self.distance, self.allowed)

    @property
    def is_different(self) -> bool:
        """Whether both runs differ by more than rounding explains."""
        return self.difference is not Difference.VALUE or not self.distance <= self.allowed

    def __str__(self) -> str:
        return f"step {self.step} {self.moment.value} {self.tensor}: {self.evidence}"

    @property
    def evidence(self) -> str:
        """Return a clause with the values of both runs, or with their distance."""
        measured = f"distance {self.distance:.3g} at norm {self.norm:.3g}, rounding explains {self.allowed:.2g}"
        return self.detail or measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How many values differ at one point in training."""

    step: int
    """Step, from 0."""
    moment: Moment
    """Point in the step."""
    num_different: int
    """How many values differ."""
    num_compared: int
    """How many values were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceVerdict(Judgement):
    """The result of `compare`: EQUIVALENT, DIVERGED or INCONCLUSIVE, with the evidence.

    Texts call the first run A and the second one B.
    """

    world: str = "recorded"
    """Always ``recorded``, because `compare` runs no ranks."""
    runs: tuple[str, str] = ("", "")
    """Text about each run: folder, number of ranks and steps."""
    first: TensorDifference | None = None
    """The first difference, named in `reason`. None if there is none."""
    where: str = ""
    """Clause about the values that agree before the first difference."""
    diagnosis: Diagnosis | None = None
    """The fault that reproduces run B's values. None if no known fault does."""
    hint: str = ""
    """Advice on the next thing to try."""
    differences: tuple[TensorDifference, ...] = ()
    """Values that differ, in training order."""
    groups: tuple[Group, ...] = ()
    """Number of differing values at each point in training, in training order."""
    notes: tuple[str, ...] = ()
    """Clauses about different environments, optimizer settings and scaled losses. They do not affect the outcome."""
    gaps: tuple[str, ...] = ()
    """Important parts that are missing in a trace. Runs with a gap are never EQUIVALENT."""
    coverage: tuple[str, ...] = ()
    """Clauses about compared values and steps, and about omitted ones."""

    @property
    def cause(self) -> Cause | None:
        """The mistake that explains run B's values; None if no known mistake does."""
        return None if self.diagnosis is None else self.diagnosis.cause

    def describe(self) -> str:
        """Return the verdict as text, wrapped to the terminal's width. `print(verdict)` prints the same text."""
        named = [] if self.first is None else [("first", self._first_tensor())]
        named += [] if self.diagnosis is None else [("why", self.diagnosis.sentence)]
        named += [("where", self.where), ("then", "; ".join(self._followers()))]
        named += [("note", note) for note in _shortened(self.notes, "note")]
        if self.outcome is not Outcome.DIVERGED:
            named += [("gap", gap) for gap in _shortened(self.gaps, "gap") if gap != self.reason]
        named += [("hint", self.hint), ("A", self.runs[0]), ("B", self.runs[1])]
        named += [("note" if number else "seen", each) for number, each in enumerate(self.coverage)]
        lines = [f"  {label + ':':6} {text}" for label, text in named if text]
        return "\n".join(wrap_lines([f"{self.outcome.value.upper()}: {self._in_short()}", *lines]))

    def _first_tensor(self) -> str:
        """Return the first tensor's name, with the evidence unless the reason contains it."""
        assert self.first is not None
        if self.first.moment in (Moment.SAMPLES, Moment.LOSS, Moment.NORM):
            return ""
        return self.first.tensor if self.first.evidence in self.reason else f"{self.first.tensor}: {self.first.evidence}"

    def _followers(self) -> list[str]:
        if self.first is None:
            return []
        place = (self.first.step, self.first.moment)
        later = [group for group in self.groups if (group.step, group.moment) != place]
        lines = [
            f"step {group.step} {group.moment.value} ({group.num_different} of {group.num_compared})"
            for group in later[:_MAX_GROUPS]
        ]
        left = len(later) - _MAX_GROUPS
        return [*lines, *([f"and {count(left, 'more moment')}"] if left > 0 else [])]


def _shortened(lines: tuple[str, ...], noun: str) -> list[str]:
    left = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"{count(left, f'more {noun}')} in the JSON"] if left > 0 else [])]
