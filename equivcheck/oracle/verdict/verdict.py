"""Verdicts: the outcome of a check, with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.cause import Diagnosis
from equivcheck.oracle.verdict.description import MAX_GROUPS, divergence_lines, failure_line, rank_lines, shorten_to_line
from equivcheck.oracle.verdict.imports import import_lines
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.scenario import describe_case
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.printable import escape_unprintable, wrap_lines
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Divergence, Phase

if TYPE_CHECKING:
    from equivcheck.training.setup import Setup

    Alter = Callable[[Setup], None]

CODE_WIDTH = 100
"""Maximum line length of code in a verdict."""
AGAIN = "again: run the case below in @example(...), or its JSON in `equivcheck check`"


class Outcome(PrintableEnum):
    """Outcome of a check, such as EQUIVALENT or DIVERGED."""

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
    """Outcome and evidence from a check on a scenario, a tensor program, or a user's training."""

    outcome: Outcome
    """Outcome, such as DIVERGED."""
    world: str
    """World in which the ranks ran."""
    reason: str = ""
    """One sentence about the evidence for the outcome. Empty if equivalent."""
    divergence: Divergence | None = None
    """The first wrong value or call. None if no value and no call differs."""
    followers: tuple[str, ...] = ()
    """Up to 20 tensors that differ after the first divergence, such as ``step 0 gradient layers.0.linear.weight``, in order."""
    num_unnamed: int = 0
    """Number of further tensors that differ, not named in `followers`."""
    failure: Failure | None = None
    """How each rank ended, if ranks crashed or hung. Else None."""
    worst_error: float = 0.0
    """Largest error in a tensor, divided by its tolerance. Below 1 if equivalent at every step."""
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
        """Return outcome and evidence as text. `print(verdict)` prints this text."""
        return f"{self.outcome.value.upper()}: {self._in_short()}"

    def _in_short(self) -> str:
        return self.reason or f"the largest error is {self.worst_error:.2g} of its tolerance"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict(Judgement):
    """Outcome and evidence from a check on a scenario or tensor program."""

    known: str = ""
    """Id of the known issue that explains the failure. Empty unless the outcome is KNOWN."""
    confirmed: str = ""
    """Sentence about the outcome in another world, such as gloo. Empty if no other world ran."""
    unfinished: str = ""
    """Part of the work after the check that failed, such as the diagnosis, with the error. Empty if nothing failed."""
    diagnosis: Diagnosis | None = None
    """The cause. None if no known fault reproduces the ranks' values, or if no diagnosis was asked for."""
    drift: str = ""
    """First value that differs if each step starts from the reference's values. Empty if this was not asked for."""
    beyond: str = ""
    """The limit of torch that the case ignores on purpose. Empty if the case is within all limits."""
    undecided: str = ""
    """Step from which on agreement proves nothing, and why, although the outcome is EQUIVALENT. Empty if every step is decided.
    """

    @property
    def case(self) -> Checkable:
        """The scenario or tensor program that was checked."""
        raise NotImplementedError

    def with_unfinished(self, what: str, error: Exception) -> Self:
        """Return the verdict with a note that `what`, a part of the work after the check, failed with `error`."""
        return replace(self, unfinished="; ".join(filter(None, (self.unfinished, failure_line(what, error)))))

    @property
    def is_clear(self) -> bool:
        """Whether the outcome is EQUIVALENT, and the reference could decide every step."""
        return self.outcome is Outcome.EQUIVALENT and not self.undecided

    def describe(self) -> str:
        """Return the verdict in at most ten lines, wrapped to the terminal's width, then the checked case as code."""
        lines = [f"{self.outcome.value.upper()}: {self.heading()}", *(f"  {line}" for line in self.evidence())]
        return "\n".join([*wrap_lines(lines), self.code()])

    def code(self) -> str:
        """Return the scenario or tensor program as formatted code, with the imports that it needs."""
        from rich.pretty import pretty_repr

        try:
            code = pretty_repr(self.case, max_width=CODE_WIDTH)
            return "\n".join([*import_lines(self.case, code, CODE_WIDTH), code])
        except Exception:  # a noun of a third party
            return repr(self.case)

    def heading(self) -> str:
        """Describe what was checked: ``ddp on 2 ranks, widths 1-1, SGD, 1 microbatch of 2 rows, 1 step, float64, in sim``."""
        return f"{describe_case(self.case)}, in {self.world}"

    def evidence(self) -> list[str]:
        """Return the lines with evidence, without the outcome and the code."""
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

    @property
    def unexplained_text(self) -> str:
        """Text for a divergence without a diagnosis. It also names collective calls that differ in the first wrong step."""
        text, step = "unexplained: no known fault reproduces this", -1 if self.divergence is None else self.divergence.step
        start = f"step {step} {Phase.COMMUNICATION.value} "
        calls = [follower.removeprefix(start) for follower in self.followers if follower.startswith(start)]
        rest = f" and {len(calls) - MAX_GROUPS} more" if len(calls) > MAX_GROUPS else ""
        return f"{text}; calls differ in the same step: {', '.join(calls[:MAX_GROUPS])}{rest}" if calls else text

    def _why(self) -> list[str]:
        if self.diagnosis is not None:
            lines = [f"why:   {shorten_to_line(self.diagnosis.sentence)}"]
        elif self.drift:
            lines = [f"why:   {shorten_to_line(self.unexplained_text)}"]
        else:
            return []
        return [*lines, f"where: {self.drift}"] if self.drift else lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(CaseVerdict):
    """Outcome and evidence from `check` on a scenario."""

    scenario: Scenario
    """The scenario that was checked."""
    unmodelled: str = ""
    """Why the ranks' communication calls were not compared with predicted calls. Empty if they were, or if nothing was compared.
    """
    calls: tuple[tuple[Call, ...], ...] = ()
    """Communication calls on each rank, in order. Empty if the world does not record calls, or if the ranks failed."""
    signature: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Summary: pairs of consecutive calls, and DTensor shardings (`equivcheck.worlds.signature`). Empty if `calls` is empty."""

    @property
    def case(self) -> Scenario:
        """The scenario that was checked."""
        return self.scenario

    def assert_equivalent(self, *, alter: Alter | None = None) -> None:
        """Raise `NotEquivalent` unless the outcome is EQUIVALENT.

        If the verdict came from `check(alter=...)`, pass the same `alter`, because the ranks run again for the diagnosis.
        """
        if self.outcome is not Outcome.EQUIVALENT:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def assert_no_finding(self, *, alter: Alter | None = None) -> None:
        """Raise `NotEquivalent` if the outcome is DIVERGED, CRASHED or HUNG. Use it in tests with generated scenarios.

        The diagnosis runs only when the exception's text is read. While Hypothesis shrinks, it raises many exceptions, but reads
        few texts. For the diagnosis, the ranks run again. If the verdict came from `check(alter=...)`, pass the same `alter`.
        """
        if self.outcome.is_finding:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def _explained(self, alter: Alter | None) -> str:
        told = self.drift or self.diagnosis or not self.outcome.is_finding
        return (self if told or _explain is None else _explain(self, alter)).describe()


_explain: Callable[[Verdict, Alter | None], Verdict] | None = None


def explain_by(explain: Callable[[Verdict, Alter | None], Verdict]) -> None:
    """Set the function that adds a diagnosis to a verdict when an exception's text is read."""
    global _explain  # noqa: PLW0603 - set once, when the judge is imported
    _explain = explain
