"""Steps traced to graphs: their operations, and when they are traced again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.fx import GraphModule

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.base.execution.whole_step import traced_graphs
from equivcheck.scenario import (
    SGD,
    SPMD,
    ActivationSharding,
    Adam,
    AuxiliaryLinear,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    Distribution,
    Execution,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Parallelism,
    Split,
    StepLR,
    TensorParallel,
    Training,
    ZeroGrad,
)
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=4), Layer(width=2)), counter=True),
    data=Data(microbatches=(4, 2)),
    loss=Loss.LINEAR_SUM,
    steps=3,
)
SPLIT = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
REPLICATED = SPMD()
FUSED = Adam(implementation=Implementation.FUSED)


def scenario(training: Training = TRAINING, parallelism: Parallelism = REPLICATED, size: int = 2) -> Scenario:
    """A training with traced steps."""
    mesh = Mesh(axes=(Axis(name=parallelism.axes[0][0], size=size),))
    return Scenario(
        training=training, layout=Layout(mesh=mesh, parallelisms=(parallelism,), execution=Execution(whole_step=True))
    )


def graphs(example: Scenario) -> Sequence[GraphModule]:
    """Graphs that the first rank traced, after the scenario was found equivalent."""
    setups: list[Setup] = []
    verdict = check(example, alter=setups.append)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    return traced_graphs(setups[0])


def ops(graph: GraphModule) -> list[str]:
    """Names of the operations that a graph calls."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("parallelism", [SPMD(), SPMD(distribution=Distribution.FULLY_SHARD), TensorParallel(plan=SPLIT)])
def test_a_graph_holds_the_whole_step(parallelism: Parallelism) -> None:
    """Forward, backward, collectives and update are operations in one graph on local tensors."""
    (graph,) = graphs(scenario(parallelism=parallelism))
    called = " ".join(ops(graph))
    for part in ("addmm", "mm", "_c10d_functional", "wait_tensor", "add_"):
        assert part in called


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 1),
        ({"optimizer": SGD(momentum=0.9)}, 2),
        ({"optimizer": FUSED}, 2),
        ({"schedule": StepLR()}, 3),
        ({"zero_grad": ZeroGrad.ZERO}, 2),
        ({"clipping": ClipNorm(max_norm=0.1)}, 1),
        ({"clipping": ClipValue(clip_value=0.1)}, 1),
        ({"model": Model(features=3, layers=(Layer(width=4, auxiliary=AuxiliaryLinear.EVEN_STEPS), Layer(width=2)))}, 2),
    ],
)
def test_a_graph_serves_every_step_that_is_alike(changes: dict[str, object], count: int) -> None:
    """A new graph is traced only for another learning rate, other gradients, other state, or other parts of the model."""
    assert len(graphs(scenario(replace(TRAINING, **changes)))) == count  # type: ignore[arg-type]


def test_a_wrong_operation_in_the_graph_is_noticed() -> None:
    """Without collectives in the graph, a training diverges."""
    example = scenario(replace(TRAINING, model=Model(features=3, layers=(Layer(width=4), Layer(width=2)))))
    assert check(example, alter=_without_reductions).outcome is Outcome.DIVERGED


def _without_reductions(setup: Setup) -> None:
    inner = setup.compute

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        loss = inner(setup, microbatches, index)
        for graph in traced_graphs(setup):
            for node in graph.graph.nodes:
                if "all_reduce" in str(node.target):
                    node.replace_all_uses_with(node.args[0])
            graph.recompile()
        return loss

    setup.compute = compute
