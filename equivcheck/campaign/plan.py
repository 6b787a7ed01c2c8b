"""What a campaign is to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from equivcheck.errors import UsageError
from equivcheck.scenario.case import Case
from equivcheck.scenario.mesh import MAX_RANKS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivcheck.oracle.verdict.verdict import CaseVerdict
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.scenario import Scenario


USUAL_CHECK_SECONDS = 0.25
"""What a check takes on average, with all that is drawn for it: 0.24 over 20,000 of all layouts."""


class Fault(Protocol):
    """A fault that a control plants."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def wrong(self) -> str:
        """What is wrong, in one sentence."""

    @property
    def applies(self) -> Callable[[Any], bool]:
        """Whether a case has what it breaks."""

    @property
    def plant(self) -> Any:
        """What a check takes as `alter`."""


class Check(Protocol):
    """What runs on every generated case."""

    def __call__(  # noqa: PLR0913 - options, all by keyword
        self,
        case: Any,
        /,
        *,
        world: str,
        deadline: float,
        alter: Any = None,
        coarse: bool = False,
        beyond: bool = False,
    ) -> CaseVerdict:
        """The verdict; an exception means that the checker itself is broken, and ends the campaign.

        `alter` plants a fault in the way of the case's kind, `coarse` is that of `equivcheck.check`; with `beyond` limits of
        torch do not count, as in `check_beyond`.
        """


def oracle_check(case: Case, /, **options: Any) -> CaseVerdict:
    """`check_case`, imported at first use."""
    from equivcheck.checking.cases import check_case

    return check_case(case, **options)


def explaining_check(case: Case, /, *, deadline: float, alter: Any = None, **options: Any) -> CaseVerdict:
    """The same with a diagnosis: for one scenario, not for many. What torch does not support needs none."""
    from equivcheck.diagnosis.explain import explained

    verdict = oracle_check(case, deadline=deadline, alter=alter, **options)
    return verdict if verdict.beyond else explained(verdict, alter=alter, deadline=deadline)


def generated_scenarios(plan: Plan) -> SearchStrategy[Scenario]:
    """The scenarios of the plan's layouts, a few compiled, one in nine resumed from a checkpoint; imported at first use."""
    from equivcheck.strategies import executions, scenarios
    from equivcheck.strategies.layout import IN_SIXTY
    from equivcheck.strategies.scenario import MORE_RESUMES

    return scenarios(
        layouts=plan.layouts or None,
        max_ranks=plan.max_ranks,
        executions=executions(compiles=IN_SIXTY),
        resumes=MORE_RESUMES,
    )


def frontier_scenarios(plan: Plan) -> SearchStrategy[Scenario]:
    """Scenarios of the plan's layouts with no regard to limits of torch; imported at first use."""
    from equivcheck.strategies import frontier

    return frontier(layouts=plan.layouts or None, max_ranks=plan.max_ranks)


def generated_programs(plan: Plan, *, operations: Collection[str] = ()) -> SearchStrategy[TensorProgram]:
    """Tensor programs, of some operations or of any; imported at first use."""
    from equivcheck.strategies import programs

    return programs(max_ranks=max(2, plan.max_ranks), operations=sorted(operations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A campaign's budget and what it draws from; it travels to the workers."""

    seed: int
    """With the number of a worker it decides everything that the worker draws; at least 0."""
    seconds: float = math.inf
    """Time budget, above 0; it starts when the workers have started."""
    num_checks: int | None = None
    """Checks after which it is over, at least 1, without those of shrinking and beyond limits; None for no such end."""
    num_workers: int = 1
    """Worker processes, at least 1."""
    world: str = "sim"
    """Where ranks run."""
    layouts: tuple[str, ...] = ()
    """Tags of the parallelisms to draw from; empty for all."""
    max_ranks: int = MAX_RANKS
    """Most ranks in a case, 1 to 8."""
    deadline: float = 30.0
    """Seconds that ranks may be idle, or compute without communicating, before they count as hung (`Patience`)."""
    stuck_seconds: float = 180.0
    """A worker is given up that is idle, or computes, for so long without an end of a check, and for what the check may compile;
    more than `deadline`."""
    shrink_seconds: float = 20.0
    """Limit for shrinking one finding, its last judgement excepted; of work (`WorkClock`)."""
    confirm: bool = True
    """Whether what is left of a finding of another world runs once more in gloo."""
    check: Check = oracle_check
    """What is run on each case; picklable."""
    strategy: Callable[[Plan], SearchStrategy[Any]] | None = generated_scenarios
    """What scenarios are drawn from; picklable; None for none."""
    programs: Callable[[Plan], SearchStrategy[Any]] | None = None
    """What tensor programs are drawn from; picklable; None for none."""
    frontier: Callable[[Plan], SearchStrategy[Scenario]] | None = None
    """What one batch in ten is drawn from, to check what is beyond limits of torch; picklable; None for no such batches."""
    controls: Callable[[Plan], Sequence[Fault]] | None = None
    """What the control is drawn from by the seed, a fault that the check must catch; picklable; None for no control."""

    def __post_init__(self) -> None:
        low = {"seconds": 0.0, "seed": -1, "num_workers": 0, "max_ranks": 0, "deadline": 0.0, "shrink_seconds": -1.0}
        for field, above in low.items():
            if not getattr(self, field) > above:
                raise UsageError(f"Plan.{field} is {getattr(self, field)!r}; allowed: above {above}")
        if self.strategy is None and self.programs is None:
            raise UsageError("Plan draws nothing; give it a strategy, programs, or both")
        if self.num_checks is None and self.seconds == math.inf:
            raise UsageError("Plan has no end; give its seconds, its num_checks, or both")
        if self.num_checks is not None and self.num_checks < 1:
            raise UsageError(f"Plan.num_checks is {self.num_checks}; allowed: at least 1, or None")
        if self.max_ranks > MAX_RANKS:
            raise UsageError(f"Plan.max_ranks is {self.max_ranks}; allowed: 1 to {MAX_RANKS}")
        if self.stuck_seconds <= self.deadline:
            raise UsageError(f"Plan.stuck_seconds is {self.stuck_seconds}; allowed: above the deadline of {self.deadline}")

    def checks_of(self, worker: int) -> float:
        """How many of the checks are one worker's, by its number; infinite where only the time ends a campaign."""
        if self.num_checks is None:
            return math.inf
        each, more = divmod(self.num_checks, self.num_workers)
        return each + (worker < more)

    @property
    def reckoned_seconds(self) -> float:
        """About how long a worker is at work."""
        return min(self.seconds, self.checks_of(0) * USUAL_CHECK_SECONDS)

    def with_more_time(self) -> Plan:
        """The plan with twice the time for each check: for what may have failed for want of it."""
        return replace(self, deadline=2 * self.deadline, stuck_seconds=2 * self.stuck_seconds)
