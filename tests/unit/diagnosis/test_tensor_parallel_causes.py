"""Faults of tensor-parallel layers are explained in every kind of layer, and behind other layers."""

from __future__ import annotations

import pytest

from equivcheck import Scenario, check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    SGD,
    AnyLayer,
    Attention,
    Axis,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Mesh,
    Model,
    Pipeline,
    Split,
    Tokens,
    Training,
)

LINEAR, ATTENTION, GATED = Layer(width=4), Attention(num_heads=2, num_kv_heads=2), GatedMLP(hidden=3)
WHOLE, ROW, WITHIN = (LayerPlan(split=split) for split in (Split.REPLICATED, Split.ROWWISE, Split.HEADS_OR_HIDDEN))
ON_2 = Mesh(axes=(Axis(name="tp", size=2),))


def planned(layers: tuple[AnyLayer, ...], plan: tuple[LayerPlan, ...]) -> Scenario:
    """Layers under tensor parallelism on plain tensors."""
    training = Training(model=Model(features=4, length=3, layers=layers), data=Data(microbatches=(4,)))
    return Scenario(training=training, layout=Layout(mesh=ON_2, parallelisms=(LocalTensorParallel(plan=plan),)))


@pytest.mark.parametrize(
    ("layers", "plan", "who"),
    [
        ((LINEAR, LINEAR), (WHOLE, ROW), "`layers.1.linear`"),
        ((LINEAR, LINEAR), (ROW, ROW), "`layers.0.linear` and `layers.1.linear`"),
        ((ATTENTION, GATED), (WITHIN, WITHIN), "`layers.0.output` and `layers.1.down`"),
        ((LINEAR, ATTENTION, LINEAR), (WHOLE, WITHIN, ROW), "`layers.1.output` and `layers.2.linear`"),
    ],
    ids=["behind a layer", "two row-wise layers", "attention and gated MLP", "three kinds"],
)
def test_partial_outputs_are_named_in_every_layer(layers: tuple[AnyLayer, ...], plan: tuple[LayerPlan, ...], who: str) -> None:
    """Ranks that continue with partial sums still sum or gather the gradients of what enters these layers."""
    fault = mutant("reduce_from_region_missing").plant
    found = explained(check(planned(layers, plan), alter=fault), alter=fault).diagnosis

    assert found is not None
    assert (found.cause, found.exact) == (Cause.PARTIAL_OUTPUT, True)
    assert f"the output of {who} is not summed over the 2 tp ranks" in found.sentence


def test_tokens_of_others_may_be_looked_up_modulo_the_shard() -> None:
    """Without a mask, the index within the shard wraps around."""
    model = Model(features=2, length=2, source=Tokens(vocabulary=4), layers=(Layer(width=2), Layer(width=2)), head=Head())
    training = Training(model=model, data=Data(microbatches=(2,)), optimizer=SGD(lr=0.1), loss=CrossEntropy())
    mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="tp", size=2)))
    plan = LocalTensorParallel(plan=(WHOLE, WHOLE), source=Split.ROWWISE)
    scenario = Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, Pipeline())))
    fault = mutant("tokens_of_others_looked_up").plant
    found = explained(check(scenario, alter=fault), alter=fault).diagnosis

    assert found is not None
    assert (found.cause, found.exact) == (Cause.ANOTHER_ROW, True)
    assert "at (token - first token of the shard) modulo the shard's size" in found.sentence
