"""Documents packed into a sequence: masks, positions and labels follow their boundaries on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    ActivationSharding,
    AdamW,
    Attention,
    AttentionExchange,
    Axis,
    ContextParallel,
    CrossEntropy,
    Data,
    Head,
    IgnoredLabels,
    LayerPlan,
    Layout,
    LoadBalancer,
    LocalTensorParallel,
    Mesh,
    Model,
    Parallelism,
    Pipeline,
    Replicate,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
)
from support.exported import run_script
from support.supported import require_supported

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = ActivationSharding.ROWS
HEADS = LayerPlan(split=Split.HEADS_OR_HIDDEN, output=ROWS)
PLAN = (HEADS, HEADS)
GATHER, ULYSSES, RING = AttentionExchange


def a_scenario(parallelism: Parallelism, axis: str, *, fused: bool = False, document_length: int = 3) -> Scenario:
    """Two steps on two ranks; sequences of 8 positions with documents that cross ranks' boundaries."""
    attention = Attention(num_heads=2, num_kv_heads=2, head_dim=2, rotary=True, fused=fused)
    model = Model(
        features=4,
        length=8,
        document_length=document_length,
        source=Tokens(vocabulary=4, learned_positions=True),
        layers=(attention, Attention(num_heads=2, num_kv_heads=2, head_dim=2, causal=False, fused=fused)),
        head=Head(),
    )
    loss = CrossEntropy(ignored=IgnoredLabels.SOME)
    return Scenario(
        training=Training(model=model, data=Data(microbatches=(2, 2)), loss=loss, optimizer=AdamW(), steps=2),
        layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=2),)), parallelisms=(parallelism,)),
    )


LAYOUTS = (
    (DDP(), "dp"),
    (Replicate(), "dp"),
    (FSDP1(), "dp"),
    (FSDP2(), "dp"),
    (ContextParallel(exchange=GATHER), "cp"),
    (ContextParallel(exchange=ULYSSES), "cp"),
    (ContextParallel(exchange=RING), "cp"),
    (ContextParallel(exchange=GATHER, balance=LoadBalancer.HEAD_TAIL), "cp"),
    (ContextParallel(exchange=RING, balance=LoadBalancer.HEAD_TAIL), "cp"),
    (Pipeline(num_chunks=2), "pp"),
    (TensorParallel(plan=PLAN, source=Split.REPLICATED, source_output=ROWS, head=Split.REPLICATED), "tp"),
    (LocalTensorParallel(plan=PLAN, source=Split.REPLICATED, source_output=ROWS, head=Split.REPLICATED), "tp"),
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("parallelism", "axis"), LAYOUTS, ids=repr)
def test_ranks_and_their_script_agree_with_one_device(parallelism: Parallelism, axis: str, fused: bool, tmp_path: Path) -> None:
    """Values agree in the check and in the exported script."""
    scenario = a_scenario(parallelism, axis, fused=fused)
    require_supported(scenario)
    check(scenario).assert_equivalent()
    run_script(scenario, tmp_path)


def test_placements_propagate_through_packed_documents(tmp_path: Path) -> None:
    """DTensor activations get the mask of documents as a replicated DTensor."""
    scenario = a_scenario(SPMD(), "dp")
    require_supported(scenario)
    check(scenario).assert_equivalent()
    run_script(scenario, tmp_path)
