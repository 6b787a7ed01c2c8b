"""At which steps ranks go wrong by themselves, when each step begins with the reference's values."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.comparison.compare import compare
from equivcheck.composition.running import Runner
from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.forcing import beginnings, forcing
from equivcheck.diagnosis.words import listed
from equivcheck.errors import EquivCheckError
from equivcheck.trace.differences import Divergence
from equivcheck.train.setup import Setup
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.ranks import Ranks


def drift_of(case: Case, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float) -> str:
    """One sentence, also where this cannot be found out."""
    if case.scenario.training.steps == 1:
        return "the only step is wrong by itself"
    if case.scenario.start is not None:
        return "not looked for: the first steps run under another layout"
    if (world if isinstance(world, str) else world.name) != "sim":
        return "not looked for: ranks that are processes cannot be given the reference's values"
    try:
        return _told(case, lambda state: _divergences(case, alter, Runner(world=world, deadline=deadline), state=state))
    except RanksFailed as error:
        return f"not found: given the reference's values, the ranks fail ({error})"
    except (EquivCheckError, RuntimeError) as error:
        return f"not found: the ranks cannot be given the reference's values ({error})"


def _divergences(case: Case, alter: Callable[[Setup], None] | None, runner: Runner, *, state: bool) -> tuple[Divergence, ...]:
    forced = Runner(world=runner.world, deadline=runner.deadline, alter=forcing(beginnings(case.scenario), alter, state=state))
    return compare(case.reference, forced.run(case.scenario).run.values).divergences


def _told(case: Case, divergences_with: Callable[[bool], tuple[Divergence, ...]]) -> str:
    found, steps = divergences_with(True), range(case.scenario.training.steps)
    wrong = [step for step in steps if any(each.step == step for each in found)]
    if not wrong:
        carried = "optimizer state" if divergences_with(False) else "the parameters"
        return f"each step is right by itself from the reference's values: it is {carried} carried over that goes wrong"
    if len(wrong) == len(steps):
        return "every step is wrong by itself"
    right = [step for step in steps if step not in wrong]
    first = next(each for each in found if each.step == wrong[0])
    return f"{_steps(right, 'right')} by itself; {_steps(wrong, 'wrong')}: {first.phase.value} of {first.tensor}"


def _steps(steps: list[int], how: str) -> str:
    numbers = [str(step) for step in steps]
    return f"step {numbers[0]} is {how}" if len(numbers) == 1 else f"steps {listed(numbers)} are {how}"
