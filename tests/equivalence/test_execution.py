"""The property: however a rank runs its part, compiled or with layers run again, it computes what one device computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from equivcheck import Scenario, check
from equivcheck.scenario import (
    DDP,
    Activation,
    ActivationSharding,
    Axis,
    Checkpointing,
    Compile,
    Data,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Replicate,
    Replicator,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.strategies import data, models, scenarios, trainings
from support.fresh import drawn_afresh

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
COMPILING = settings(UNHURRIED, phases=(Phase.explicit, Phase.generate))
"""A compiled scenario costs seconds, so none to shrink with, and few of them in all."""
FEW = max(3, settings().max_examples // 33)

RECOMPUTING = st.sampled_from(
    (Execution(checkpointing=Checkpointing.EVERY_LAYER), Execution(checkpointing=Checkpointing.ODD_LAYERS))
)
RECOMPUTES = st.sampled_from((Checkpointing.NONE, Checkpointing.NONE, Checkpointing.ODD_LAYERS))
SMALL = trainings(models=models(max_layers=3), data=data(max_microbatches=2), steps=st.sampled_from((2, 1)))

REPLICATED = ("ddp", "replicate")
COMPILED = (*REPLICATED, "fsdp1", "fsdp2", "tensor_parallel", "spmd", "fsdp2 x tensor_parallel", "replicate x tensor_parallel")


@drawn_afresh(scenarios(executions=RECOMPUTING, max_ranks=4), examples=max(10, settings().max_examples // 10))
def test_recomputed_layers_leave_what_kept_activations_leave(scenario: Scenario) -> None:
    """Under any layout, with dropout and without, checkpointed layers change nothing."""
    check(scenario).assert_no_finding()


@pytest.mark.parametrize("recompute", Checkpointing)
@pytest.mark.parametrize("split", [Split.COLWISE, Split.ROWWISE])
@pytest.mark.parametrize("activation", [Activation.IDENTITY, Activation.GELU])
def test_a_linear_with_fewer_features_than_ranks_gathers_its_weight_as_predicted(
    activation: Activation, split: Split, recompute: Checkpointing
) -> None:
    """When depends on the version of torch: for the input's gradient, or when the layer is recomputed.

    An activation lets recomputation go on to the linear's output, which selective checkpointing has kept.
    """
    model = Model(features=1, layers=(Layer(width=1), Layer(width=1, activation=activation), Layer(width=1)))
    parallel = TensorParallel(plan=(LayerPlan(), LayerPlan(split=split), LayerPlan()))
    layout = Layout(
        mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(parallel,), execution=Execution(checkpointing=recompute)
    )
    training = Training(model=model, data=Data(microbatches=(2,)))
    check(Scenario(training=training, layout=layout)).assert_equivalent()


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ({"compile": Compile.AOT_EAGER}, COMPILED),
        pytest.param({"compile": Compile.AOT_EAGER, "per_layer": True}, COMPILED, marks=pytest.mark.slow),
        ({"compiled_autograd": True}, (*REPLICATED, "tensor_parallel", "spmd")),
        pytest.param({"compile": Compile.AOT_EAGER, "compiled_autograd": True}, REPLICATED, marks=pytest.mark.slow),
    ],
    ids=["forward", "layers", "backward", "both"],
)
def test_compiled_equals_single_device(options: dict[str, object], layouts: tuple[str, ...]) -> None:
    """With synchronisation at every microbatch or at the last, forward and backward leave the same when they are compiled."""

    @settings(COMPILING, max_examples=FEW)
    @given(scenarios(layouts=layouts, executions=_executions(options), trainings=SMALL, max_ranks=2))
    def equivalent(scenario: Scenario) -> None:
        verdict = check(scenario)
        assert verdict.world == ("gloo" if scenario.layout.execution.is_compiled else "sim")
        verdict.assert_no_finding()

    equivalent()


def _executions(options: dict[str, object]) -> st.SearchStrategy[Execution]:
    return st.builds(Execution, checkpointing=RECOMPUTES, **{name: st.just(value) for name, value in options.items()})


COLUMN, ROW = LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE)
PAIRS = Layout(
    mesh=Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2))),
    parallelisms=(TensorParallel(plan=(COLUMN, ROW, COLUMN, ROW)), DDP()),
    execution=Execution(compile=Compile.AOT_EAGER, per_layer=True),
)
REPLICAS = st.sampled_from(
    (DDP(), Replicate(), DDP(no_sync=True), Replicate(no_sync=True), Replicate(implementation=Replicator.FSDP))
)
"""What replicates over tensor parallelism."""


@pytest.mark.slow
@settings(COMPILING, max_examples=FEW)
@given(
    scenarios(
        layouts=REPLICAS.map(lambda replica: replace(PAIRS, parallelisms=(*PAIRS.parallelisms[:1], replica))), trainings=SMALL
    )
)
def test_compiled_pairs_of_column_and_row_under_replication(scenario: Scenario) -> None:
    """Four linears, column then row twice, on a mesh of (dp, tp): compiled they leave what one device leaves."""
    check(scenario).assert_no_finding()
