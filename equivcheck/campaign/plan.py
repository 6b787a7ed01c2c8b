"""The plan of a campaign: its budget, its strategies and its check."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from equivcheck.errors import UsageError
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.mesh import MAX_RANKS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivcheck.oracle.verdict.verdict import CaseVerdict
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.scenario import Scenario


USUAL_CHECK_SECONDS = 0.25
"""Mean seconds per check, including the drawing of cases for it: 0.24 over 20,000 checks in all layouts."""


class Fault(Protocol):
    """Protocol for a bug planted on purpose."""

    @property
    def name(self) -> str:
        """Name of the bug, unique among all bugs."""

    @property
    def wrong(self) -> str:
        """The mistake, in one sentence."""

    @property
    def applies(self) -> Callable[[Any], bool]:
        """Function that says whether planting the bug can change a case."""

    @property
    def plant(self) -> Any:
        """Value for a check's argument `alter`, which plants the bug."""


class Check(Protocol):
    """Protocol for the function that checks generated cases."""

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
        """Return the verdict. If this function raises, the checker itself is broken, and the campaign ends.

        `alter` plants a fault. `coarse` has the meaning it has in `equivcheck.check`. `beyond` ignores torch's known limits.
        """


def oracle_check(case: Checkable, /, **options: Any) -> CaseVerdict:
    """Check a case with `check_case`. It is imported inside this function, because the import of torch is slow."""
    from equivcheck.checking.cases import check_case

    return check_case(case, **options)


def explaining_check(case: Checkable, /, *, deadline: float, alter: Any = None, **options: Any) -> CaseVerdict:
    """Check a case and diagnose a failure.

    This is slower than `oracle_check`. A case that torch does not support gets no diagnosis.
    """
    from equivcheck.diagnosis.explain import explained

    verdict = oracle_check(case, deadline=deadline, alter=alter, **options)
    return verdict if verdict.beyond else explained(verdict, alter=alter, deadline=deadline)


def generated_scenarios(plan: Plan) -> SearchStrategy[Scenario]:
    """Return a strategy for scenarios with the plan's layouts.

    A few scenarios are compiled, and one in nine resumes from a checkpoint.
    """
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
    """Return a strategy for scenarios with the plan's layouts, some of them beyond torch's known limits."""
    from equivcheck.strategies import frontier

    return frontier(layouts=plan.layouts or None, max_ranks=plan.max_ranks)


def generated_programs(plan: Plan, *, operations: Collection[str] = ()) -> SearchStrategy[TensorProgram]:
    """Return a strategy for tensor programs. If `operations` are given, programs contain only these."""
    from equivcheck.strategies import programs

    return programs(max_ranks=max(2, plan.max_ranks), operations=sorted(operations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A campaign's budget and strategies. Raises `UsageError` for an invalid field.

    Workers receive a pickled plan.
    """

    seed: int
    """Campaign seed, at least 0. With the worker's number, it determines all random draws of that worker."""
    seconds: float = math.inf
    """Time budget, above 0. The time starts when all workers are ready."""
    num_checks: int | None = None
    """Number of checks, at least 1; None for no maximum. Checks for shrinking, and checks beyond limits, do not count."""
    num_workers: int = 1
    """How many worker processes run, at least 1."""
    world: str = "sim"
    """World in which the ranks run."""
    layouts: tuple[str, ...] = ()
    """Names of parallelisms for the drawn layouts; empty for all."""
    max_ranks: int = MAX_RANKS
    """Maximum number of ranks in a case, 1 to 8."""
    deadline: float = 30.0
    """Seconds of waiting, or of computing without communication, after which ranks count as hung (`Patience`)."""
    stuck_seconds: float = 180.0
    """Seconds of waiting or computing within one check, after which a worker counts as stuck. Compile time is added. Must be
    above `deadline`.
    """
    shrink_seconds: float = 20.0
    """Seconds of work (`WorkClock`) for shrinking one finding. The last check is not included."""
    confirm: bool = True
    """Whether a shrunk finding from another world is run once more in gloo."""
    check: Check = oracle_check
    """Function that checks each case. It must be picklable."""
    strategy: Callable[[Plan], SearchStrategy[Any]] | None = generated_scenarios
    """Function that returns the strategy for scenarios, picklable; None if the campaign checks no scenarios."""
    programs: Callable[[Plan], SearchStrategy[Any]] | None = None
    """Function that returns the strategy for tensor programs, picklable; None if the campaign checks no tensor programs."""
    frontier: Callable[[Plan], SearchStrategy[Scenario]] | None = None
    """Function that returns the strategy for scenarios beyond limits, picklable. It is used in one batch in ten. None if the
    campaign checks no such scenarios.
    """
    controls: Callable[[Plan], Sequence[Fault]] | None = None
    """Function that returns bugs, picklable. The campaign plants one of them on purpose. None to plant no bug."""

    def __post_init__(self) -> None:
        low = {"seconds": 0.0, "seed": -1, "num_workers": 0, "max_ranks": 0, "deadline": 0.0, "shrink_seconds": -1.0}
        for field, above in low.items():
            if not getattr(self, field) > above:
                raise UsageError(f"Plan.{field} {getattr(self, field)!r} is not valid: too low. Expected a number above {above}")
        if self.strategy is None and self.programs is None:
            raise UsageError(
                "Plan.strategy None is not valid: Plan.programs is None, too, so no cases can be drawn. "
                "Expected one of them, or both"
            )
        if self.num_checks is None and self.seconds == math.inf:
            raise UsageError("Plan.seconds inf is not valid: the campaign never ends. Expected seconds, num_checks, or both")
        if self.num_checks is not None and self.num_checks < 1:
            raise UsageError(f"Plan.num_checks {self.num_checks} is not valid: too low. Expected at least 1, or None")
        if self.max_ranks > MAX_RANKS:
            raise UsageError(f"Plan.max_ranks {self.max_ranks} is not valid: too many. Expected 1 to {MAX_RANKS}")
        if self.stuck_seconds <= self.deadline:
            expected = f"more than the deadline, {self.deadline}"
            raise UsageError(f"Plan.stuck_seconds {self.stuck_seconds} is not valid: too low. Expected {expected}")

    def checks_of(self, worker: int) -> float:
        """Return how many checks worker number `worker` runs; infinity if the plan limits only the time."""
        if self.num_checks is None:
            return math.inf
        each, more = divmod(self.num_checks, self.num_workers)
        return each + (worker < more)

    @property
    def expected_seconds(self) -> float:
        """Expected working time of one worker, in seconds."""
        return min(self.seconds, self.checks_of(0) * USUAL_CHECK_SECONDS)

    def with_more_time(self) -> Plan:
        """Return the plan with twice the time for each check.

        A second check with this plan tells whether too little time caused a failure.
        """
        return replace(self, deadline=2 * self.deadline, stuck_seconds=2 * self.stuck_seconds)
