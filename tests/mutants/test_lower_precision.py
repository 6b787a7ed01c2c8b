"""Precision faults are caught at the first step if they change any bit in a gradient or parameter."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.program import rank_program
from equivcheck.mutants.precision import masters_in_bfloat16, reduced_in_bfloat16
from equivcheck.scenario import SGD, AdamW, ElementType, MixedPrecision
from equivcheck.strategies import optimizers, scenarios, trainings
from equivcheck.training.setup import Setup
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.trace import Trace
from support.lowered import lowered_layouts
from support.verdicts import first_divergence

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = max(3, settings().max_examples // 30)
UNHURRIED = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
TRAININGS = trainings(optimizers=optimizers(kinds=st.sampled_from((SGD, AdamW))))
"""Elementwise optimizers only: with others, one rounding may change a full matrix, so verdicts may be in doubt."""
PARAMS = st.sampled_from((ElementType.BFLOAT16, ElementType.FLOAT16, None))
REDUCED_IN_FLOAT32 = st.fixed_dictionaries(
    {"mixed_precision": st.builds(MixedPrecision, param=PARAMS, reduce=st.just(ElementType.FLOAT32))}
)


def _first_steps(scenario: Scenario, alter: Callable[[Setup], None] | None) -> list[np.ndarray]:
    run = ranks("sim", scenario.layout.mesh.num_ranks).run(rank_program, scenario, alter)
    traces: tuple[Trace, ...] = run.values
    return [values for trace in traces for values in (trace.steps[0].gradients.values, trace.steps[0].parameters.values)]


def _assert_caught(scenario: Scenario, fault: Callable[[Setup], None]) -> None:
    """Assert that the fault is caught if the scenario is equivalent without it and any bit differs in the first step."""
    if check(scenario).outcome is not Outcome.EQUIVALENT:
        return
    if all(map(np.array_equal, _first_steps(scenario, None), _first_steps(scenario, fault))):
        return
    assert first_divergence(check(scenario, alter=fault)).step == 0


@settings(UNHURRIED, max_examples=EXAMPLES)
@given(scenarios(trainings=TRAININGS, layouts=lowered_layouts("fsdp2", max_ranks=4, options=REDUCED_IN_FLOAT32)))
def test_a_reduction_in_bfloat16_instead_of_float32_is_caught(scenario: Scenario) -> None:
    """Gradients may be computed in lower precision or not."""
    _assert_caught(scenario, reduced_in_bfloat16)


@pytest.mark.parametrize("tag", [*(pytest.param(tag, marks=pytest.mark.slow) for tag in ("ddp", "fsdp1")), "fsdp2"])
def test_parameters_kept_in_bfloat16_are_caught(tag: str) -> None:
    """Parameters are updated in the training's own precision."""

    @settings(UNHURRIED, max_examples=EXAMPLES)
    @given(scenarios(trainings=TRAININGS, layouts=lowered_layouts(tag, max_ranks=4)))
    def caught(scenario: Scenario) -> None:
        _assert_caught(scenario, masters_in_bfloat16)

    caught()


@pytest.mark.slow
def test_a_reduction_in_bfloat16_shrinks_to_two_ranks_and_one_layer() -> None:
    """A finding in lower precision shrinks as far as others."""
    smallest = find(
        scenarios(layouts=lowered_layouts("fsdp2", max_ranks=4, options=REDUCED_IN_FLOAT32)),
        lambda scenario: check(scenario, alter=reduced_in_bfloat16).outcome is Outcome.DIVERGED,
        settings=settings(UNHURRIED, max_examples=200, database=None, derandomize=True, phases=(Phase.generate, Phase.shrink)),
    )

    assert smallest.layout.mesh.num_ranks == 2
    assert len(smallest.training.model.layers) == 1
    assert smallest.training.steps == 1
    assert check(smallest).outcome is Outcome.EQUIVALENT
