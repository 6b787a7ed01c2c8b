"""Positions cut over ranks: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck import check
from equivcheck.layouts.base.positions import positions_of_ranks
from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Attention,
    AttentionExchange,
    Axis,
    Checkpointing,
    Compile,
    ContextParallel,
    CrossEntropy,
    Data,
    Execution,
    GatedMLP,
    Head,
    IgnoredLabels,
    Layer,
    Layout,
    LoadBalancer,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Replicate,
    Replicator,
    Scenario,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from support.clipped import clipped_scenario
from support.exported import run_script
from support.supported import require_mended, require_supported
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

DECODER = Model(
    features=6,
    source=Tokens(vocabulary=7, padding=1, learned_positions=True),
    length=7,
    layers=(
        Attention(num_heads=4, num_kv_heads=2, head_dim=2, rotary=True, bias=True, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=8, bias=True, norm=Norm.LAYER),
        Layer(width=6, norm=Norm.RMS, residual=True),
        Attention(num_heads=3, num_kv_heads=1, head_dim=3, fused=True),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)
LABELS = CrossEntropy(ignored=IgnoredLabels.SOME, label_smoothing=0.1, class_weights=True, z_loss=0.01)
EVERY_WAY = [(exchange, balance) for exchange in AttentionExchange for balance in LoadBalancer]
WRITTEN_IN_EACH_RUN = ((AttentionExchange.GATHER, LoadBalancer.CONTIGUOUS), (AttentionExchange.RING, LoadBalancer.HEAD_TAIL))


def a_scenario(
    parallelism: ContextParallel,
    *around: Parallelism,
    ranks: int = 2,
    loss: Loss | CrossEntropy = LABELS,
    checkpointing: Checkpointing = Checkpointing.NONE,
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped."""
    axes = {**({"dp": 2} if around else {}), "cp": ranks}
    return clipped_scenario(DECODER, axes, parallelism, *around, loss=loss, checkpointing=checkpointing)


@given(
    balance=st.sampled_from(LoadBalancer),
    length=st.integers(min_value=1, max_value=40),
    ranks=st.integers(min_value=1, max_value=9),
)
def test_each_position_is_on_one_rank(balance: LoadBalancer, length: int, ranks: int) -> None:
    """Whatever the balance, and in order on each rank."""
    found = positions_of_ranks(ContextParallel(balance=balance), length, ranks)
    assert len(found) == ranks
    assert sorted(position for part in found for position in part) == list(range(length))
    assert all(list(part) == sorted(part) for part in found)


def test_head_and_tail_give_every_rank_as_much_to_see() -> None:
    """Under a causal mask, where the length is a multiple of twice the ranks."""
    found = positions_of_ranks(ContextParallel(balance=LoadBalancer.HEAD_TAIL), 12, 3)
    assert found == ((0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7))
    assert len({sum(position + 1 for position in part) for part in found}) == 1


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize(("exchange", "balance"), EVERY_WAY)
@pytest.mark.parametrize("loss", [LABELS, Loss.MSE_MEAN], ids=["labels", "mean"])
def test_uneven_and_empty_parts_equal_one_device(
    ranks: int, exchange: AttentionExchange, balance: LoadBalancer, loss: Any
) -> None:
    """Seven positions and two or one heads of keys over up to five ranks: the last has no position, and some no head."""
    scenario = a_scenario(ContextParallel(exchange=exchange, balance=balance), ranks=ranks, loss=loss)
    require_supported(scenario)
    require_predicted(scenario)


@pytest.mark.parametrize(
    "around",
    [DDP(no_sync=True), Replicate(implementation=Replicator.FSDP), FSDP2(wrapping=Wrapping.PER_LAYER, no_sync=True)],
    ids=["ddp", "replicate", "fsdp2"],
)
@pytest.mark.parametrize("exchange", AttentionExchange)
def test_data_parallelism_around_it(around: Parallelism, exchange: AttentionExchange) -> None:
    """Rows over one axis and positions over the other; a layer that is recomputed exchanges again."""
    checkpointing = Checkpointing.EVERY_LAYER if isinstance(around, DDP) else Checkpointing.NONE
    scenario = a_scenario(ContextParallel(exchange=exchange), around, checkpointing=checkpointing)
    require_supported(scenario)
    verdict = check(scenario)
    require_mended(verdict)
    verdict.assert_equivalent()
    assert not verdict.unmodelled


@pytest.mark.parametrize(
    ("exchange", "balance"),
    [pytest.param(*way, marks=[] if way in WRITTEN_IN_EACH_RUN else [pytest.mark.slow]) for way in EVERY_WAY],
)
def test_a_script_computes_what_ranks_compute(exchange: AttentionExchange, balance: LoadBalancer, tmp_path: Path) -> None:
    """A script of torch alone has the exchange in full."""
    around = DDP() if balance is LoadBalancer.CONTIGUOUS else FSDP2(wrapping=Wrapping.PER_LAYER)
    scenario = a_scenario(ContextParallel(exchange=exchange, balance=balance), around)
    require_supported(scenario)
    require_mended(check(scenario))
    run_script(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", AttentionExchange)
def test_a_compiled_model_computes_the_same(exchange: AttentionExchange) -> None:
    """Forward and backward compiled, in processes: what an exchange keeps for backward is known to both."""
    model = Model(
        features=4, source=Tokens(vocabulary=5), length=3, layers=(Attention(num_heads=2, num_kv_heads=2),), head=Head()
    )
    execution = Execution(compile=Compile.AOT_EAGER, compiled_autograd=True)
    mesh = Mesh(axes=(Axis(name="cp", size=2),))
    layout = Layout(mesh=mesh, parallelisms=(ContextParallel(exchange=exchange),), execution=execution)
    check(Scenario(training=Training(model=model, data=Data(microbatches=(2,)), loss=LABELS), layout=layout)).assert_equivalent()


def test_what_is_no_sequence_has_no_positions() -> None:
    """A model over single rows is not supported, and nor is another parallelism of the model around it."""
    rows = Training(model=Model(features=3, layers=(Layer(width=2),)), data=Data(microbatches=(2,)))
    layout = Layout(mesh=Mesh(axes=(Axis(name="cp", size=2),)), parallelisms=(ContextParallel(),))
    assert "a model over single rows" in (limit_reason(rows, layout) or "")
    axes = (Axis(name="tp", size=2), Axis(name="cp", size=2))
    within = Layout(mesh=Mesh(axes=axes), parallelisms=(ContextParallel(), TensorParallel()))
    assert "DDP" in (limit_reason(replace(rows, model=replace(rows.model, length=2)), within) or "")
