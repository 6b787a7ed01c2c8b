"""The property in lower precision: ranks compute what one device computes that rounds at the same places."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from equivcheck import Scenario, check
from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Axis,
    Compression,
    Data,
    ElementType,
    Layer,
    Layout,
    LowPrecision,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    Parallelism,
    Precision,
    Replicate,
    Training,
)
from equivcheck.strategies import scenarios
from equivcheck.worlds.pool import ranks
from support.lowered import OPTIONS, lowered_layouts

SIM_EXAMPLES = max(5, settings().max_examples // 20)
GLOO_EXAMPLES = max(3, settings().max_examples // 30)
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

TRAINING = Training(
    model=Model(features=5, layers=(Layer(width=6, norm=Norm.RMS, dropout=0.3), Layer(width=3))),
    data=Data(microbatches=(4, 4)),
    precision=Precision.FLOAT32,
    steps=2,
)
BF16, FP16, FP32 = ElementType.BFLOAT16, ElementType.FLOAT16, ElementType.FLOAT32


def _cast(no_sync: bool = False, **types: ElementType) -> FSDP2:
    return FSDP2(mixed_precision=MixedPrecision(**types), no_sync=no_sync)


@pytest.mark.parametrize("tag", OPTIONS)
def test_ranks_in_lower_precision_equal_a_device_that_rounds_alike_in_sim(tag: str) -> None:
    """Whatever is cast, compressed or reduced in another element type, the reference that does the same is met."""

    @settings(UNHURRIED, max_examples=SIM_EXAMPLES)
    @given(scenarios(layouts=lowered_layouts(tag)))
    def equivalent(scenario: Scenario) -> None:
        check(scenario).assert_no_finding()

    equivalent()


@pytest.mark.parametrize("tag", OPTIONS)
def test_ranks_in_lower_precision_equal_a_device_that_rounds_alike_over_gloo(tag: str) -> None:
    """Sums in the order of gloo's rings are within the floor as well."""

    @settings(UNHURRIED, max_examples=GLOO_EXAMPLES, phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(scenarios(layouts=lowered_layouts(tag, max_ranks=4)))
    def equivalent(scenario: Scenario) -> None:
        check(scenario, world="gloo").assert_no_finding()

    equivalent()


@pytest.mark.parametrize(
    ("declared", "done"),
    [
        pytest.param(DDP(compression=Compression.FP16), DDP(), id="not compressed"),
        pytest.param(DDP(), DDP(compression=Compression.FP16), id="compressed"),
        pytest.param(Replicate(), Replicate(compression=Compression.FP16), id="replicate compressed"),
        pytest.param(DDP(autocast=LowPrecision.BFLOAT16), DDP(), id="no autocast"),
        pytest.param(DDP(autocast=LowPrecision.BFLOAT16), DDP(autocast=LowPrecision.FLOAT16), id="other autocast"),
        pytest.param(_cast(param=BF16), FSDP2(), id="parameters not cast"),
        pytest.param(_cast(param=BF16), _cast(param=FP16), id="parameters cast otherwise"),
        pytest.param(_cast(output=FP16), FSDP2(), id="output not cast"),
        pytest.param(_cast(param=BF16, reduce=FP32), _cast(param=BF16, reduce=BF16), id="reduced in bfloat16"),
        pytest.param(_cast(True, param=BF16, reduce=FP32), _cast(True, param=BF16, reduce=BF16), id="accumulated in bfloat16"),
    ],
)
def test_a_layout_that_rounds_elsewhere_than_it_declares_differs_at_the_first_step(
    declared: Parallelism, done: Parallelism
) -> None:
    """A rounding too many, too few or to another type is beyond the floor at once."""
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    layout = Layout(mesh=mesh, parallelisms=(declared,))
    run = ranks("sim", 2).run(rank_program, Scenario(training=TRAINING, layout=replace(layout, parallelisms=(done,))))

    divergences = compare(ReferenceRun(TRAINING, rounding_of(layout, TRAINING.precision)).reference(), run.values).divergences

    assert divergences
    assert divergences[0].step == 0
