"""The outcome of a check, with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict.cause import Diagnosis
from equivcheck.oracle.verdict.description import failed, of_divergence, of_ranks, shortened
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Case
from equivcheck.scenario.scenario import in_words
from equivcheck.system.choice import Choice
from equivcheck.system.printable import printable
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Divergence

if TYPE_CHECKING:
    from equivcheck.training.setup import Setup

    Alter = Callable[[Setup], None]

CODE_WIDTH = 100
"""Characters of a line of code."""
AGAIN = "again: the case below, as @example(...) of a test, or as JSON for `equivcheck check FILE`"


class Outcome(Choice):
    """What a check found."""

    EQUIVALENT = "equivalent"
    DIVERGED = "diverged"
    CRASHED = "crashed"
    HUNG = "hung"
    KNOWN = "known"
    INCONCLUSIVE = "inconclusive"
    UNSUPPORTED = "unsupported"

    @property
    def is_finding(self) -> bool:
        """Whether it is something new and wrong, to be kept and looked at."""
        return self in (Outcome.DIVERGED, Outcome.CRASHED, Outcome.HUNG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a judge says of any case: of a scenario, or of a training that a user brings."""

    outcome: Outcome
    """What was found."""
    world: str
    """Where the ranks ran."""
    reason: str = ""
    """One sentence for people; empty when equivalent."""
    divergence: Divergence | None = None
    """The first divergence; None unless diverged."""
    followers: tuple[str, ...] = ()
    """Other tensors that differ, as ``step 0 gradient layers.0.linear.weight``, in order, at most 20."""
    num_unnamed: int = 0
    """Tensors that differ besides the first and those in `followers`."""
    failure: Failure | None = None
    """What happened to the ranks; None unless crashed or hung."""
    worst_error: float = 0.0
    """The largest error over all tensors in units of tolerance; below 1 when equivalent at every step."""
    seconds: float = 0.0
    """Time of the whole check."""

    def assert_equivalent(self) -> None:
        """Raise `NotEquivalent` unless the outcome is EQUIVALENT: also where nothing could be established."""
        if self.outcome is not Outcome.EQUIVALENT:
            raise NotEquivalent(self.describe())

    def assert_no_finding(self) -> None:
        """Raise `NotEquivalent` if the outcome is DIVERGED, CRASHED or HUNG; what could not be established passes."""
        if self.outcome.is_finding:
            raise NotEquivalent(self.describe())

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """The outcome and its evidence as text; `print(verdict)` shows it."""
        return f"{self.outcome.value.upper()}: {self._in_short()}"

    def _in_short(self) -> str:
        """The reason; where there is none, how close it was."""
        return self.reason or f"the largest error is {self.worst_error:.2g} of its tolerance"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict(Judgement):
    """What is said of a case of any kind: all that campaigns, stores and reports know of one."""

    known: str = ""
    """Identifier of the known upstream issue; empty unless known."""
    confirmed: str = ""
    """Whether another world finds the same, in words; empty if nobody has asked."""
    unfinished: str = ""
    """What of the work on a finding failed, as its diagnosis, and with what; empty where nothing did."""
    diagnosis: Diagnosis | None = None
    """Why, if a known fault reproduces it; None when none does, or nobody has asked (`explained`)."""
    drift: str = ""
    """Where it starts, found by giving the ranks the reference's values at the start of each step; empty if nobody has asked."""
    beyond: str = ""
    """The limit of torch that the case is beyond; empty where it is within all limits, or was not to be run beyond any."""
    undecided: str = ""
    """Why later steps of what is equivalent say nothing, and from which on; empty where every step does."""

    @property
    def case(self) -> Case:
        """What was checked."""
        raise NotImplementedError

    def without(self, what: str, error: Exception) -> Self:
        """The verdict, and that a part of the work on it failed: that costs no more than this text."""
        return replace(self, unfinished="; ".join(filter(None, (self.unfinished, failed(what, error)))))

    @property
    def is_clear(self) -> bool:
        """Whether it is equivalent, and at every step."""
        return self.outcome is Outcome.EQUIVALENT and not self.undecided

    def describe(self) -> str:
        """At most ten lines for people, then the case as code."""
        lines = [f"{self.outcome.value.upper()}: {self.heading()}", *(f"  {line}" for line in self.evidence())]
        return "\n".join([*lines, self.code()])

    def code(self) -> str:
        """The case as code, broken over lines as a formatter would."""
        from rich.pretty import pretty_repr

        try:
            return pretty_repr(self.case, max_width=CODE_WIDTH)
        except Exception:  # a noun of a third party
            return repr(self.case)

    def heading(self) -> str:
        """What was checked where: ``ddp on 2 ranks, widths 1-1, SGD, 1 microbatch of 2 rows, 1 step, float64, in sim``."""
        return f"{in_words(self.case)}, in {self.world}"

    def evidence(self) -> list[str]:
        """What was found, a line each: without the outcome, and without the case as code."""
        try:
            lines = self._evidence()
        except Exception as error:
            lines = [f"what: {shortened(self.reason)}", f"note:  {failed('telling more', error)}", AGAIN]
        return [printable(line) for line in lines]

    def _evidence(self) -> list[str]:
        if not self.outcome.is_finding:
            return self._plainly()
        first = self.divergence
        lines = [f"what: {shortened(self.reason)}"] if first is None else of_divergence(first, self.followers, self.num_unnamed)
        if self.failure is not None and self.diagnosis is None:
            lines += of_ranks(self.failure)
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
        return [*lines, f"on file as {self.known}"] if self.known else lines

    def _why(self) -> list[str]:
        if self.diagnosis is not None:
            lines = [f"why:   {shortened(self.diagnosis.sentence)}"]
        elif self.drift:
            lines = ["why:   unexplained: no known fault reproduces this"]
        else:
            return []
        return [*lines, f"where: {self.drift}"] if self.drift else lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(CaseVerdict):
    """What `check` returns of a scenario."""

    scenario: Scenario
    """What was checked."""
    unmodelled: str = ""
    """Why the ranks' calls were not compared with the expected ones; empty where they were, or where nothing was compared."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Per rank, its calls in the order of issue; empty in a world that does not see them, or where the ranks failed."""
    signature: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """What the ranks did (`equivcheck.worlds.signature`); empty as `calls`."""

    @property
    def case(self) -> Scenario:
        """The scenario."""
        return self.scenario

    def assert_equivalent(self, *, alter: Alter | None = None) -> None:
        """Raise `NotEquivalent` unless the outcome is EQUIVALENT; `alter` is as for `assert_no_finding`."""
        if self.outcome is not Outcome.EQUIVALENT:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def assert_no_finding(self, *, alter: Alter | None = None) -> None:
        """Raise `NotEquivalent` if something new and wrong was found: DIVERGED, CRASHED or HUNG; for generated scenarios.

        Its text has a diagnosis, worked out when it is asked for: where many are raised, as while Hypothesis shrinks, few are
        read. The ranks run again for it, with `alter` if that is what the verdict was found with.
        """
        if self.outcome.is_finding:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def _explained(self, alter: Alter | None) -> str:
        told = self.drift or self.diagnosis or not self.outcome.is_finding
        return (self if told or _explain is None else _explain(self, alter)).describe()


_explain: Callable[[Verdict, Alter | None], Verdict] | None = None


def explain_by(explain: Callable[[Verdict, Alter | None], Verdict]) -> None:
    """Let errors ask for a diagnosis when their text is read; the judge says of whom, as it knows the diagnosis."""
    global _explain  # noqa: PLW0603 - set once, when the judge is imported
    _explain = explain
