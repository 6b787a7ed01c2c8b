"""Positions cut over ranks: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck import Outcome, check
from equivcheck.composition.limits import unsupported
from equivcheck.export.script import script_of
from equivcheck.layouts import gradients_by_hand
from equivcheck.layouts.script.numbers import Numbers
from equivcheck.parallelisms.context_parallel import parts, ring
from equivcheck.parallelisms.context_parallel.positions import positions_of_ranks
from equivcheck.parallelisms.context_parallel.ranks import Gather, PositionRanks
from equivcheck.parallelisms.context_parallel.sequences import Gathered, PartOfSequence, RoundTrips
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AdamW,
    Attention,
    Axis,
    Balance,
    ClipNorm,
    Compile,
    ContextParallel,
    CrossEntropy,
    Data,
    Exchange,
    Execution,
    GatedMLP,
    Head,
    Ignored,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Recompute,
    Replicate,
    Replicator,
    Scenario,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from exported import printed_differences

pytestmark = pytest.mark.mostly_equivalent

DECODER = Model(
    features=6,
    source=Tokens(vocabulary=7, padding=1, learned_positions=True),
    length=7,
    layers=(
        Attention(heads=4, kv_heads=2, head_width=2, rotary=True, bias=True, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=8, bias=True, norm=Norm.LAYER),
        Layer(width=6, norm=Norm.RMS, residual=True),
        Attention(heads=3, kv_heads=1, head_width=3, fused=True),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)
LABELS = CrossEntropy(ignored=Ignored.SOME, label_smoothing=0.1, class_weights=True, z_loss=0.01)
EVERY_WAY = [(exchange, balance) for exchange in Exchange for balance in Balance]


def a_scenario(
    parallelism: ContextParallel,
    *around: Parallelism,
    ranks: int = 2,
    loss: Loss | CrossEntropy = LABELS,
    checkpointing: Recompute = Recompute.NONE,
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped."""
    training = Training(
        model=DECODER, data=Data(microbatches=(4, 2)), loss=loss, optimizer=AdamW(), clipping=ClipNorm(max_norm=0.05), steps=2
    )
    axes = (*(Axis(name="dp", size=2),) * len(around), Axis(name="cp", size=ranks))
    execution = Execution(checkpointing=checkpointing)
    return Scenario(
        training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism, *around), execution=execution)
    )


@given(
    balance=st.sampled_from(Balance), length=st.integers(min_value=1, max_value=40), ranks=st.integers(min_value=1, max_value=9)
)
def test_each_position_is_on_one_rank(balance: Balance, length: int, ranks: int) -> None:
    """Whatever the balance, and in order on each rank."""
    found = positions_of_ranks(ContextParallel(balance=balance), length, ranks)
    assert len(found) == ranks
    assert sorted(position for part in found for position in part) == list(range(length))
    assert all(list(part) == sorted(part) for part in found)


def test_head_and_tail_give_every_rank_as_much_to_see() -> None:
    """Under a causal mask, where the length is a multiple of twice the ranks."""
    found = positions_of_ranks(ContextParallel(balance=Balance.HEAD_TAIL), 12, 3)
    assert found == ((0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7))
    assert len({sum(position + 1 for position in part) for part in found}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("exchange", "balance"), EVERY_WAY)
@pytest.mark.parametrize("loss", [LABELS, Loss.MSE_MEAN], ids=["labels", "mean"])
def test_uneven_and_empty_parts_equal_one_device(ranks: int, exchange: Exchange, balance: Balance, loss: Any) -> None:
    """Seven positions and two or one heads of keys over up to five ranks: the last has no position, and some no head."""
    verdict = check(a_scenario(ContextParallel(exchange=exchange, balance=balance), ranks=ranks, loss=loss))
    verdict.assert_equivalent()
    assert not verdict.unmodelled


@pytest.mark.parametrize(
    "around",
    [DDP(no_sync=True), Replicate(implementation=Replicator.FSDP), FSDP2(wrapping=Wrapping.PER_LAYER, no_sync=True)],
    ids=["ddp", "replicate", "fsdp2"],
)
@pytest.mark.parametrize("exchange", Exchange)
@pytest.mark.parametrize("checkpointing", [Recompute.NONE, Recompute.EVERY_LAYER])
def test_data_parallelism_around_it(around: Parallelism, exchange: Exchange, checkpointing: Recompute) -> None:
    """Rows over one axis and positions over the other; a layer that is recomputed exchanges again."""
    verdict = check(a_scenario(ContextParallel(exchange=exchange), around, checkpointing=checkpointing))
    verdict.assert_equivalent()
    assert not verdict.unmodelled


@pytest.mark.parametrize(("exchange", "balance"), EVERY_WAY)
def test_a_script_computes_what_ranks_compute(exchange: Exchange, balance: Balance, tmp_path: Path) -> None:
    """A script of torch alone has the exchange in full."""
    around = DDP() if balance is Balance.CONTIGUOUS else FSDP2(wrapping=Wrapping.PER_LAYER)
    scenario = a_scenario(ContextParallel(exchange=exchange, balance=balance), around)
    code, differences, printed = printed_differences(script_of(scenario, numbers=Numbers.EXACT), 4, tmp_path)
    assert code == 0, printed
    assert differences


@pytest.mark.parametrize("exchange", Exchange)
def test_a_compiled_model_computes_the_same(exchange: Exchange) -> None:
    """Forward and backward compiled, in processes: what an exchange keeps for backward is known to both."""
    model = Model(features=4, source=Tokens(vocabulary=5), length=3, layers=(Attention(heads=2, kv_heads=2),), head=Head())
    execution = Execution(compile=Compile.AOT_EAGER, compiled_autograd=True)
    mesh = Mesh(axes=(Axis(name="cp", size=2),))
    layout = Layout(mesh=mesh, parallelisms=(ContextParallel(exchange=exchange),), execution=execution)
    check(Scenario(training=Training(model=model, data=Data(microbatches=(2,)), loss=LABELS), layout=layout)).assert_equivalent()


def test_what_is_no_sequence_has_no_positions() -> None:
    """A model over single rows is not supported, and nor is another parallelism of the model around it."""
    rows = Training(model=Model(features=3, layers=(Layer(width=2),)), data=Data(microbatches=(2,)))
    layout = Layout(mesh=Mesh(axes=(Axis(name="cp", size=2),)), parallelisms=(ContextParallel(),))
    assert "has none" in (unsupported(rows, layout) or "")
    axes = (Axis(name="tp", size=2), Axis(name="cp", size=2))
    within = Layout(mesh=Mesh(axes=axes), parallelisms=(ContextParallel(), TensorParallel()))
    assert "DDP" in (unsupported(replace(rows, model=replace(rows.model, length=2)), within) or "")


def _local_positions(_sequence: PartOfSequence, count: int, _device: torch.device) -> torch.Tensor:
    return torch.arange(count)


def _by_order_of_ranks(sequence: Gathered, looks: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    ranks, count = sequence.ranks, query.shape[-2]
    keys, values = Gather.apply(torch.stack((key, value)), ranks).unbind()  # type: ignore[no-untyped-call]
    start = sum(len(part) for part in ranks.parts[: ranks.index])
    unseen = looks.unseen(torch.arange(start, start + count), torch.arange(ranks.length))
    return looks.attend_from(query, looks.grouped(keys), looks.grouped(values), unseen)


def _sliced(ctx: Any, *gradients: torch.Tensor) -> Any:
    return gradients[0].index_select(-2, ctx.ranks.own), None


def _contiguous_labels(right: Callable[..., Any]) -> Callable[..., Any]:
    def positions_of(batch: Any, positions: torch.Tensor) -> Any:
        start = int(positions[0]) if len(positions) else 0
        targets = batch.targets.narrow(1, min(start, batch.targets.shape[1] - len(positions)), len(positions))
        return replace(right(batch, positions), targets=targets)

    return positions_of


def _shifted_labels(right: Callable[..., Any]) -> Callable[..., Any]:
    def positions_of(batch: Any, positions: torch.Tensor) -> Any:
        taken = right(batch, positions)
        return replace(taken, targets=taken.targets.roll(-1, 1))

    return positions_of


def _mean_of_own(setup: Any, ranks: PositionRanks) -> None:
    inner, size = setup.loss, ranks.size
    setup.loss = lambda *arguments: inner(*arguments) / size


def _without_rescaling(softmax: Any, largest: torch.Tensor) -> None:
    softmax.largest = largest


def _backward_of_own_block(ctx: Any, *gradients: torch.Tensor) -> Any:
    """Nothing goes round."""
    turned, values = ctx.ring, RIGHT_BACKWARD(ctx, *gradients)
    return values[0], values[1] / turned.ranks.size, None


RIGHT_BACKWARD = ring.RingAttention.backward
TAIL = ContextParallel(balance=Balance.HEAD_TAIL)
MISTAKES: dict[str, tuple[Any, str, Any, ContextParallel, Loss | CrossEntropy]] = {
    "counts positions from the start of its part": (PartOfSequence, "positions", _local_positions, ContextParallel(), LABELS),
    "masks by the order of ranks": (Gathered, "attended", _by_order_of_ranks, TAIL, LABELS),
    "keeps its own gradients of its keys": (Gather, "backward", staticmethod(_sliced), ContextParallel(), LABELS),
    "cuts labels in a row": (parts, "positions_of", _contiguous_labels(parts.positions_of), TAIL, LABELS),
    "shifts labels after the cut": (parts, "positions_of", _shifted_labels(parts.positions_of), ContextParallel(), LABELS),
    "averages means of unequal parts": (parts, "own_loss", _mean_of_own, ContextParallel(), Loss.MSE_MEAN),
    "sums no gradients": (gradients_by_hand, "sum_gradients", lambda *_: None, ContextParallel(), LABELS),
    "does not rescale": (
        ring.BlockwiseSoftmax,
        "rescale",
        _without_rescaling,
        ContextParallel(exchange=Exchange.RING),
        LABELS,
    ),
    "loses gradients of the ring": (
        ring.RingAttention,
        "backward",
        staticmethod(_backward_of_own_block),
        ContextParallel(exchange=Exchange.RING),
        LABELS,
    ),
    "looks at its own block alone": (
        RoundTrips,
        "attended",
        lambda _sequence, looks, query, key, value: looks.attend(query, looks.grouped(key), looks.grouped(value)),
        ContextParallel(exchange=Exchange.RING),
        LABELS,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of what such code gets wrong is a finding, and without it the same scenario is none."""
    owner, name, wrong, parallelism, loss = MISTAKES[mistake]
    scenario = a_scenario(parallelism, loss=loss)
    assert check(scenario).outcome is Outcome.EQUIVALENT
    monkeypatch.setattr(owner, name, wrong)
    assert check(scenario).outcome.is_finding
