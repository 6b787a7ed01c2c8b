"""Verdicts: the outcome of a check, with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.cause import Diagnosis
from equivcheck.oracle.verdict.description import divergence_lines, failure_line, rank_lines, shorten_to_line
from equivcheck.oracle.verdict.imports import import_lines
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.scenario import describe_case
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.printable import escape_unprintable, wrap_lines
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Divergence

if TYPE_CHECKING:
    from equivcheck.training.setup import Setup

    Alter = Callable[[Setup], None]

CODE_WIDTH = 100
"""Maximum line length of code in a verdict."""
AGAIN = "again: run the case below in @example(...), or its JSON in `equivcheck check`"


class Outcome(PrintableEnum):
    """Result of a check."""

    EQUIVALENT = "equivalent"
    DIVERGED = "diverged"
    CRASHED = "crashed"
    HUNG = "hung"
    KNOWN = "known"
    INCONCLUSIVE = "inconclusive"
    UNSUPPORTED = "unsupported"

    @property
    def is_finding(self) -> bool:
        """Whether the outcome is a new problem: DIVERGED, CRASHED or HUNG."""
        return self in (Outcome.DIVERGED, Outcome.CRASHED, Outcome.HUNG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result for any case: a scenario, a tensor program, or a user's training."""

    outcome: Outcome
    """The result."""
    world: str
    """World in which the ranks ran."""
    reason: str = ""
    """One sentence. Empty if equivalent."""
    divergence: Divergence | None = None
    """The first divergence. None unless values or calls differ."""
    followers: tuple[str, ...] = ()
    """Up to 20 further tensors that differ, such as ``step 0 gradient layers.0.linear.weight``, in order."""
    num_unnamed: int = 0
    """Number of differing tensors that neither `divergence` nor `followers` names."""
    failure: Failure | None = None
    """State of the ranks. None unless ranks crashed or hung."""
    worst_error: float = 0.0
    """Largest error relative to tolerance, over all tensors. Below 1 if equivalent at every step."""
    seconds: float = 0.0
    """Duration of the whole check."""

    def assert_equivalent(self) -> None:
        """Raise `NotEquivalent` unless the outcome is EQUIVALENT. INCONCLUSIVE and UNSUPPORTED raise, too."""
        if self.outcome is not Outcome.EQUIVALENT:
            raise self._error()

    def assert_no_finding(self) -> None:
        """Raise `NotEquivalent` if the outcome is DIVERGED, CRASHED or HUNG. Other outcomes pass."""
        if self.outcome.is_finding:
            raise self._error()

    def _error(self) -> NotEquivalent:
        return NotEquivalent(self.describe())

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Outcome and evidence as text. `print(verdict)` shows it."""
        return f"{self.outcome.value.upper()}: {self._in_short()}"

    def _in_short(self) -> str:
        return self.reason or f"the largest error is {self.worst_error:.2g} of its tolerance"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict(Judgement):
    """Verdict on a scenario or a tensor program. Campaigns, stores and reports work with it."""

    known: str = ""
    """Id of the known issue. Empty unless the outcome is KNOWN."""
    confirmed: str = ""
    """Sentence about the result in another world. Empty if no other world ran."""
    unfinished: str = ""
    """Part of the work on a finding that failed, such as its diagnosis, with the error. Empty if nothing failed."""
    diagnosis: Diagnosis | None = None
    """Fault that reproduces the finding. None if no known fault does, or if no diagnosis was asked for (`explained`)."""
    drift: str = ""
    """First place that differs if each step starts from the reference's values. Empty if this was not asked for."""
    beyond: str = ""
    """The limit of torch that the case ignores. Empty if the case is within all limits."""
    undecided: str = ""
    """Why an equivalent case proves nothing from some step on, and the step. Empty if every step is decided."""

    @property
    def case(self) -> Checkable:
        """The scenario or tensor program."""
        raise NotImplementedError

    def with_unfinished(self, what: str, error: Exception) -> Self:
        """The verdict with a note that a part of the work on it failed."""
        return replace(self, unfinished="; ".join(filter(None, (self.unfinished, failure_line(what, error)))))

    @property
    def is_clear(self) -> bool:
        """Whether the outcome is EQUIVALENT and every step is decided."""
        return self.outcome is Outcome.EQUIVALENT and not self.undecided

    def describe(self) -> str:
        """Verdict in at most ten lines, wrapped to the terminal's width, then the case as code."""
        lines = [f"{self.outcome.value.upper()}: {self.heading()}", *(f"  {line}" for line in self.evidence())]
        return "\n".join([*wrap_lines(lines), self.code()])

    def code(self) -> str:
        """The case as formatted code, after the imports that it needs."""
        from rich.pretty import pretty_repr

        try:
            code = pretty_repr(self.case, max_width=CODE_WIDTH)
            return "\n".join([*import_lines(self.case, code, CODE_WIDTH), code])
        except Exception:  # a noun of a third party
            return repr(self.case)

    def heading(self) -> str:
        """Case and world, such as ``ddp on 2 ranks, widths 1-1, SGD, 1 microbatch of 2 rows, 1 step, float64, in sim``."""
        return f"{describe_case(self.case)}, in {self.world}"

    def evidence(self) -> list[str]:
        """Lines of evidence, without the outcome and the code."""
        try:
            lines = self._evidence()
        except Exception as error:
            lines = [f"what: {shorten_to_line(self.reason)}", f"note:  {failure_line('describing more', error)}", AGAIN]
        return [escape_unprintable(line) for line in lines]

    def _evidence(self) -> list[str]:
        if not self.outcome.is_finding:
            return self._plainly()
        first = self.divergence
        lines = (
            [f"what: {shorten_to_line(self.reason)}"]
            if first is None
            else divergence_lines(first, self.followers, self.num_unnamed)
        )
        if self.failure is not None and self.diagnosis is None:
            lines += rank_lines(self.failure)
        lines += self._why()
        if self.confirmed:
            lines.append(f"confirmed: {self.confirmed}")
        if self.unfinished:
            lines.append(f"note:  {self.unfinished}")
        return [*lines, AGAIN]

    def _plainly(self) -> list[str]:
        lines = [self._in_short()]
        if self.undecided:
            lines.append(self.undecided)
        return [*lines, f"known issue of torch: {self.known}"] if self.known else lines

    def _why(self) -> list[str]:
        if self.diagnosis is not None:
            lines = [f"why:   {shorten_to_line(self.diagnosis.sentence)}"]
        elif self.drift:
            lines = ["why:   unexplained: no known fault reproduces this"]
        else:
            return []
        return [*lines, f"where: {self.drift}"] if self.drift else lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(CaseVerdict):
    """Verdict on a scenario, as `check` returns it."""

    scenario: Scenario
    """The scenario."""
    unmodelled: str = ""
    """Why the ranks' calls were not compared with expected calls. Empty if they were, or if nothing was compared."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Calls in order of issue, per rank. Empty if the world does not see calls, or if the ranks failed."""
    signature: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Fingerprints of the ranks' work (`equivcheck.worlds.signature`). Empty if `calls` is empty."""

    @property
    def case(self) -> Scenario:
        """The scenario."""
        return self.scenario

    def assert_equivalent(self, *, alter: Alter | None = None) -> None:
        """Raise `NotEquivalent` unless the outcome is EQUIVALENT. See `assert_no_finding` for `alter`."""
        if self.outcome is not Outcome.EQUIVALENT:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def assert_no_finding(self, *, alter: Alter | None = None) -> None:
        """Raise `NotEquivalent` if the outcome is DIVERGED, CRASHED or HUNG. Tests with generated scenarios use it.

        The exception computes a diagnosis when its text is read, because Hypothesis raises many while it shrinks and reads few.
        The ranks then run again. If the verdict came from `check(alter=...)`, pass the same `alter`.
        """
        if self.outcome.is_finding:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def _explained(self, alter: Alter | None) -> str:
        told = self.drift or self.diagnosis or not self.outcome.is_finding
        return (self if told or _explain is None else _explain(self, alter)).describe()


_explain: Callable[[Verdict, Alter | None], Verdict] | None = None


def explain_by(explain: Callable[[Verdict, Alter | None], Verdict]) -> None:
    """Set the function that computes a diagnosis for an exception's text."""
    global _explain  # noqa: PLW0603 - set once, when the judge is imported
    _explain = explain
