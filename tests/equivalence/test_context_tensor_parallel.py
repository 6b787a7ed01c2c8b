"""Positions cut over ranks around heads and features shared out: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from equivcheck import check
from equivcheck.export.script import script_of
from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.parallelisms.context_parallel import parts
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.scenario import (
    ActivationSharding,
    Attention,
    AttentionExchange,
    Checkpointing,
    ContextParallel,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    LoadBalancer,
    LocalDataParallel,
    LocalTensorParallel,
    Model,
    Norm,
    Parallelism,
    Scenario,
    Split,
    Tokens,
)
from support.clipped import clipped_scenario
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

DECODER = Model(
    features=5,
    source=Tokens(vocabulary=5, padding=1, learned_positions=True),
    length=7,
    layers=(
        Attention(num_heads=4, num_kv_heads=2, head_dim=2, rotary=True, bias=True, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=7, bias=True, norm=Norm.LAYER),
        Layer(width=5, norm=Norm.RMS, residual=True, dropout=0.25),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)


def a_scenario(
    exchange: AttentionExchange = AttentionExchange.GATHER,
    output: ActivationSharding = ActivationSharding.ROWS,
    *around: Parallelism,
    ranks: tuple[int, int] = (2, 2),
    **execution: Checkpointing,
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped, over ranks of positions and of tensors."""
    splits = (Split.HEADS_OR_HIDDEN, Split.HEADS_OR_HIDDEN, Split.COLWISE)
    plan = tuple(LayerPlan(split=split, output=output) for split in splits)
    inner = LocalTensorParallel(plan=plan, source=Split.ROWWISE, source_output=output, head=Split.COLWISE, loss_parallel=True)
    axes = {**({"dp": 2} if around else {}), "cp": ranks[0], "tp": ranks[1]}
    positions = ContextParallel(exchange=exchange, balance=LoadBalancer.HEAD_TAIL)
    return clipped_scenario(DECODER, axes, inner, positions, *around, **execution)


@pytest.mark.parametrize("exchange", AttentionExchange)
@pytest.mark.parametrize("output", [ActivationSharding.REPLICATED, ActivationSharding.ROWS])
def test_heads_and_positions_in_parts_equal_one_device(exchange: AttentionExchange, output: ActivationSharding) -> None:
    """Each rank looks with some of the heads from some of the positions, of which it has a part alone between layers."""
    require_predicted(a_scenario(exchange, output))


@pytest.mark.parametrize(("ranks", "checkpointing"), [((4, 2), Checkpointing.NONE), ((1, 2), Checkpointing.EVERY_LAYER)])
def test_empty_parts_and_axes_of_one_equal_one_device(ranks: tuple[int, int], checkpointing: Checkpointing) -> None:
    """Of seven positions over four ranks, in eight parts, one has a single one; another layout cuts none."""
    require_predicted(a_scenario(AttentionExchange.RING, ranks=ranks, checkpointing=checkpointing))


def test_gradients_averaged_by_hand_around_both_equal_one_device() -> None:
    """Rows, positions and heads over three axes."""
    require_predicted(a_scenario(AttentionExchange.ULYSSES, ActivationSharding.ROWS, LocalDataParallel(flat_buffer=True)))


def test_processes_compute_the_same() -> None:
    """Gloo moves what simulated ranks move."""
    check(a_scenario(AttentionExchange.ULYSSES), world="gloo").assert_equivalent()


def test_a_script_is_refused_by_name() -> None:
    """Both have moves of their own."""
    with pytest.raises(CannotExport, match="LocalTensorParallel inside ContextParallel"):
        script_of(a_scenario())


def _cut_the_other_way_round(setup: Any, ranks: Any) -> None:
    """Ranks of tensors take their part of the positions before those of positions do."""
    inner = setup.take
    setup.take = lambda batch: parts.positions_of(inner(batch), ranks.own)


def _sum_of_part(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parameters, group: right([each for each in parameters if each.dim() > 1], group)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "counts the positions of whole sequences": (parts, "take_positions", _cut_the_other_way_round),
    "sums gradients of matrices alone over positions": (
        gradients_by_hand,
        "sum_gradients",
        _sum_of_part(gradients_by_hand.sum_gradients),
    ),
    "sums no gradients of norms over tensors": (AxisRanks, "copy_to_region", lambda _ranks, parameter: parameter),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of what such code gets wrong is a finding."""
    monkeypatch.setattr(*MISTAKES[mistake])
    assert check(a_scenario()).outcome.is_finding
