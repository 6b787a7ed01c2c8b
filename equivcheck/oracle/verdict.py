"""The outcome of a check, with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivcheck.choice import Choice
from equivcheck.errors import NotEquivalent
from equivcheck.oracle.cause import Diagnosis
from equivcheck.oracle.description import describe
from equivcheck.scenario import Scenario
from equivcheck.trace.differences import Divergence
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import Failure

if TYPE_CHECKING:
    from equivcheck.train.setup import Setup


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
class Verdict:
    """What `check` returns."""

    outcome: Outcome
    """What was found."""
    scenario: Scenario
    """What was checked."""
    world: str
    """Where the ranks ran."""
    reason: str = ""
    """One sentence for people; empty when equivalent."""
    divergence: Divergence | None = None
    """The first divergence; None unless diverged."""
    followers: tuple[str, ...] = ()
    """Other tensors that differ, as ``step 0 gradient layers.0.linear.weight``, in order, at most 20."""
    failure: Failure | None = None
    """What happened to the ranks; None unless crashed or hung."""
    diagnosis: Diagnosis | None = None
    """Why, if something that is known to go wrong explains it; None when nothing does, or nobody has asked (`explained`)."""
    drift: str = ""
    """Where it starts, found by giving the ranks the reference's values at the start of each step; empty if nobody has asked."""
    confirmed: str = ""
    """Whether another world finds the same, in words; empty if nobody has asked."""
    known: str = ""
    """Identifier of the known upstream issue; empty unless known."""
    worst_error: float = 0.0
    """The largest error over all tensors in units of tolerance; below 1 when equivalent at every step."""
    seconds: float = 0.0
    """Time of the whole check."""
    undecided: str = ""
    """Why later steps of what is equivalent say nothing, and from which on; empty where every step does."""
    unforeseen: str = ""
    """Why the ranks' calls were not held against a prediction; empty where they were, or where nothing was compared."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Per rank, its calls in the order of issue; empty in a world that does not see them, or where the ranks failed."""

    @property
    def is_clear(self) -> bool:
        """Whether it is equivalent, and at every step."""
        return self.outcome is Outcome.EQUIVALENT and not self.undecided

    def assert_equivalent(self, *, alter: Callable[[Setup], None] | None = None) -> None:
        """Raise `NotEquivalent` if something new and wrong was found; known, inconclusive and unsupported ones pass silently.

        Its text has a diagnosis, worked out when it is asked for: where many are raised, as while Hypothesis shrinks, few are
        read. The ranks run again for it, with `alter` if that is what the verdict was found with.
        """
        if self.outcome.is_finding:
            raise NotEquivalent(self.describe(), lambda: self._explained(alter))

    def describe(self) -> str:
        """At most ten lines for people, then the scenario as code."""
        return describe(self)

    def _explained(self, alter: Callable[[Setup], None] | None) -> str:
        from equivcheck.oracle.diagnosis import explained

        return describe(self if self.drift or self.diagnosis else explained(self, alter=alter))
