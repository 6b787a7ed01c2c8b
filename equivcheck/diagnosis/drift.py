"""Find the steps that go wrong even if each starts from the reference's values, or the state that carries the error over."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.reference_values import start_steps_from, values_at_steps
from equivcheck.diagnosis.words import join_words
from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.running import Runner
from equivcheck.oracle.comparison.compare import compare
from equivcheck.training.setup import Setup
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.differences import Divergence, Phase

FROM_REFERENCE = "when it starts from the reference's values"


def drift_of(diverged: DivergedRun, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float) -> str:
    """One sentence about the steps that go wrong, or about why they cannot be examined."""
    if diverged.training.steps == 1:
        return "in the only step"
    if diverged.resumes:
        return "not examined: the first steps run under another layout"
    if (world if isinstance(world, str) else world.name) != "sim":
        return "not examined: only the sim world can give ranks the reference's values"
    try:
        return _sentence(diverged.training.steps, lambda state: _divergences(diverged, alter, world, deadline, state=state))
    except RanksFailed as error:
        return f"not examined: the ranks fail when given the reference's values ({error})"
    except (EquivCheckError, RuntimeError) as error:
        return f"not examined: the ranks cannot be given the reference's values ({error})"


def _divergences(
    diverged: DivergedRun, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float, *, state: bool
) -> tuple[Divergence, ...]:
    """Divergences left if each step starts from the reference's parameters, and with `state` from its optimizer state too."""
    forced = start_steps_from(values_at_steps(diverged.scenario), alter, state=state)
    result = Runner(world=world, deadline=deadline, alter=forced).run(diverged.scenario)
    return compare(diverged.reference, result.run.values).divergences


def _sentence(num_steps: int, divergences_with: Callable[[bool], tuple[Divergence, ...]]) -> str:
    found = divergences_with(True)
    wrong = [step for step in range(num_steps) if any(each.step == step for each in found)]
    if not wrong:
        carried = "the optimizer state carried over is" if divergences_with(False) else "the parameters carried over are"
        return f"between steps: each is right {FROM_REFERENCE}, so {carried} wrong"
    if len(wrong) == num_steps:
        return f"in every step, also {FROM_REFERENCE}"
    right = [step for step in range(num_steps) if step not in wrong]
    first = next(each for each in found if each.step == wrong[0])
    what = first.tensor if first.phase is Phase.LOSS else f"{first.phase.value} of {first.tensor}"
    where = f"in {_numbered(wrong)} ({what}), also {FROM_REFERENCE}"
    return f"{where}; {_numbered(right)} {'is' if len(right) == 1 else 'are'} right"


def _numbered(steps: list[int]) -> str:
    return f"step{'' if len(steps) == 1 else 's'} {join_words([str(step) for step in steps])}"
