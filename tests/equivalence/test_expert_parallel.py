"""Experts shared out over ranks: what one device computes, with the calls that can be foreseen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from equivcheck import check
from equivcheck.composition.limits import why_unsupported
from equivcheck.scenario import (
    AdamW,
    Attention,
    Axis,
    ClipNorm,
    Compile,
    CrossEntropy,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    Head,
    Layout,
    Mesh,
    Model,
    Norm,
    Recompute,
    Scenario,
    Tokens,
    Training,
)
from equivcheck.trace.stage import Stage

EXPERTS = Experts(hidden=3, num_experts=3, top_k=2, normalised=True, bias=True, norm=Norm.RMS, shared=True)


def a_scenario(ranks: int = 2, layer: Experts = EXPERTS, **execution: object) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped by norm."""
    model = Model(
        features=4, source=Tokens(vocabulary=7), length=3, layers=(Attention(), layer, layer), head=Head(tied=True, norm=Norm.RMS)
    )
    training = Training(
        model=model,
        data=Data(microbatches=(12, 24)),
        loss=CrossEntropy(),
        optimizer=AdamW(),
        clipping=ClipNorm(max_norm=0.05),
        steps=2,
    )
    layout = Layout(
        mesh=Mesh(axes=(Axis(name="ep", size=ranks),)),
        parallelisms=(ExpertParallel(),),
        execution=Execution(**execution),  # type: ignore[arg-type]
    )
    return Scenario(training=training, layout=layout)


@pytest.mark.parametrize("num_experts", [2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uneven_experts_and_ranks_without_any_equal_one_device(num_experts: int, ranks: int) -> None:
    """Of two experts over four ranks two hold none: they send rows, and take part in every call."""
    layer = replace(EXPERTS, num_experts=num_experts, weighs_input=num_experts == 3)
    verdict = check(a_scenario(ranks, layer))
    verdict.assert_equivalent()
    assert not verdict.unmodelled


def test_ranks_without_a_row_for_their_experts_equal_one_device() -> None:
    """One row of one position chooses one of eight experts: seven compute nothing, on ranks of which one sends nothing."""
    scenario = a_scenario(4, replace(EXPERTS, num_experts=8, top_k=1, normalised=False, shared=False))
    training = replace(scenario.training, model=replace(scenario.training.model, length=1), data=Data(microbatches=(4,)))
    check(replace(scenario, training=training)).assert_equivalent()


@pytest.mark.parametrize("checkpointing", [Recompute.NONE, Recompute.EVERY_LAYER])
def test_a_layer_makes_five_all_to_alls(checkpointing: Recompute) -> None:
    """Counts and rows there and back, and both gradients; what is computed again is exchanged again."""
    verdict = check(a_scenario(checkpointing=checkpointing))
    verdict.assert_equivalent()
    of_step = Counter(call.step for call in verdict.calls[0] if call.op == "all_to_all" and call.stage is Stage.COMPUTE)
    assert of_step == dict.fromkeys((0, 1), (5 + 3 * (checkpointing is not Recompute.NONE)) * 2 * 2)


def test_what_no_graph_holds_is_not_compiled() -> None:
    """The limit says why."""
    assert "depends on values" in (why_unsupported(a_scenario(compile=Compile.AOT_EAGER)) or "")
