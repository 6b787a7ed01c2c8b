"""Limits that some versions of torch have."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from packaging.version import Version

from equivcheck import Scenario, check
from equivcheck.layouts.base.limits.limit import Limit
from equivcheck.layouts.base.limits.optimizers import with_elementwise_optimizer
from equivcheck.layouts.composition.limits import limit_reason, repair_layout, repair_training
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Adafactor,
    Adam,
    Attention,
    AttentionExchange,
    Axis,
    ContextParallel,
    Data,
    Distribution,
    Experts,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Muon,
    Norm,
    Parallelism,
    Pipeline,
    Replicate,
    Replicator,
    Split,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.system import torch_version
from equivcheck.worlds.trace.differences import Difference
from unit.layouts.plain import PLAIN, layout_of, with_layer

MUON = replace(PLAIN, model=Model(features=4, layers=(Layer(width=4, bias=False),)), optimizer=Muon())


@pytest.mark.parametrize(
    ("installed", "expected"), [("2.9.1", "no Muon (torch <2.11)"), ("2.11.0", None), ("2.16.0.dev20270101", None)]
)
def test_a_limit_of_some_versions_of_torch(installed: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds where one of them is installed, and its reason names them."""
    limit = Limit(
        reason="no Muon",
        torch="<2.11",
        applies=lambda training, _: isinstance(training.optimizer, Muon),
        repair=with_elementwise_optimizer,
    )
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    monkeypatch.setattr(type(kind_of(DDP())), "limits", (limit,))
    assert limit_reason(MUON, layout_of(DDP())) == expected
    assert repair_training(MUON, layout_of(DDP())).optimizer.elementwise is (expected is not None)


@pytest.mark.parametrize(("installed", "supported"), [("2.10.0", False), ("2.11.0", True)])
def test_flat_parameters_of_linears_that_are_unfrozen(monkeypatch: pytest.MonkeyPatch, installed: str, supported: bool) -> None:
    """Before torch 2.11 tensor parallelism makes frozen linears trainable, which one flat parameter cannot hold beside norms."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    flat = FSDP1(use_orig_params=False, wrapping=Wrapping.PER_LAYER)
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    plan = TensorParallel(plan=(LayerPlan(split=Split.ROWWISE), LayerPlan()))
    layout = Layout(mesh=mesh, parallelisms=(plan, flat))
    training = with_layer(0, frozen=True, norm=Norm.LAYER)

    assert (limit_reason(training, layout) is None) is supported
    assert limit_reason(repair_training(training, layout), layout) is None


@pytest.mark.parametrize(("installed", "supported"), [("2.10.0", False), ("2.11.0", True)])
def test_adafactor_of_linears_that_are_unfrozen(monkeypatch: pytest.MonkeyPatch, installed: str, supported: bool) -> None:
    """Before torch 2.11 a frozen linear that is cut is trained as any other."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    layout = layout_of(TensorParallel(plan=(LayerPlan(split=Split.ROWWISE), LayerPlan())))
    training = replace(with_layer(0, frozen=True), optimizer=Adafactor())

    assert (limit_reason(training, layout) is None) is supported
    assert limit_reason(repair_training(training, layout), layout) is None
    assert limit_reason(replace(training, optimizer=Adam()), layout) is None


@pytest.mark.parametrize(("installed", "supported"), [("2.12.1", False), ("2.13.0", True)])
def test_adafactor_of_lists_of_dtensors(monkeypatch: pytest.MonkeyPatch, installed: str, supported: bool) -> None:
    """Before torch 2.13 it goes through its parameters one by one; plain tensors may be in lists on every version."""
    adafactor = replace(PLAIN, optimizer=Adafactor(implementation=Implementation.FOREACH))
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))

    assert (limit_reason(adafactor, layout_of(SPMD())) is None) is supported
    assert limit_reason(repair_training(adafactor, layout_of(SPMD())), layout_of(SPMD())) is None
    assert limit_reason(adafactor, layout_of(DDP())) is None


FULLY_SHARDED = layout_of(SPMD(distribution=Distribution.FULLY_SHARD))
NORMED = replace(with_layer(norm=Norm.RMS), loss=Loss.LINEAR_SUM)


@pytest.mark.parametrize(("installed", "reason"), [("2.9.1", "rms_norm of sharded features"), ("2.10.0", None)])
def test_cut_features_are_not_normalised(installed: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.10, only the model's inputs are, whichever norm is asked for."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    assert (limit_reason(NORMED, FULLY_SHARDED) or "").partition(" is not supported")[0] == (
        f"DTensor: {reason}" if reason else ""
    )
    assert limit_reason(replace(with_layer(0, norm=Norm.RMS), loss=Loss.LINEAR_SUM), FULLY_SHARDED) is None
    assert limit_reason(NORMED, layout_of(SPMD())) is None
    if reason:
        for norm, index in product((Norm.RMS, Norm.LAYER), (0, 1)):
            within = repair_training(replace(with_layer(index, norm=norm), loss=Loss.LINEAR_SUM), FULLY_SHARDED)
            assert limit_reason(within, FULLY_SHARDED) is None
            assert within.model.layers[index].norm is (None if index else Norm.RMS)


@pytest.mark.parametrize(
    ("installed", "exchange", "ranks", "is_refused"),
    [
        ("2.11.0", AttentionExchange.ULYSSES, 3, True),
        ("2.11.0", AttentionExchange.ULYSSES, 2, False),
        ("2.11.0", AttentionExchange.RING, 3, False),
        ("2.12.1", AttentionExchange.ULYSSES, 3, False),
    ],
)
def test_a_rank_without_heads_has_no_fused_attention(
    installed: str, exchange: AttentionExchange, ranks: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.12 it ends the process; explicit attention is run everywhere."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    layout = Layout(mesh=Mesh(axes=(Axis(name="cp", size=ranks),)), parallelisms=(ContextParallel(exchange=exchange),))
    model = Model(features=4, length=3, layers=(Attention(num_heads=4, num_kv_heads=2, fused=True),))
    training = Training(model=model, data=Data(microbatches=(2,)), loss=Loss.LINEAR_SUM)
    assert ("ends the process" in (limit_reason(training, layout) or "")) is is_refused
    assert limit_reason(repair_training(training, layout), layout) is None


@pytest.mark.parametrize(("installed", "is_refused"), [("2.9.1", True), ("2.10.0", False)])
def test_experts_are_not_selected_from_dtensors(installed: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.10 the first that is selected spoils the others."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    layout, model = layout_of(SPMD()), Model(features=4, layers=(Experts(hidden=2, dispatched=False),))
    training = Training(model=model, data=Data(microbatches=(2,)), loss=Loss.LINEAR_SUM)
    assert ("selecting along a dim" in (limit_reason(training, layout) or "")) is is_refused
    assert limit_reason(repair_training(training, layout), layout) is None


BALANCED = Training(
    model=Model(features=2, length=2, layers=(Experts(hidden=1, num_experts=2, balance=0.1),)), data=Data(microbatches=(2,))
)


@pytest.mark.parametrize(("installed", "is_refused"), [("2.10.0", False), ("2.11.0", True), ("2.12.1", False)])
def test_a_mean_loss_has_no_load_balancing_loss(installed: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 cannot add an average over ranks and a sum over ranks. One rank, or a sum loss, is supported."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    for training in (BALANCED, replace(BALANCED, loss=Loss.LINEAR_MEAN)):
        if installed == "2.10.0" and not training.loss.is_linear:
            continue
        assert ("load-balancing loss" in (limit_reason(training, layout_of(SPMD())) or "")) is is_refused
        within = repair_training(training, layout_of(SPMD()))
        assert limit_reason(within, layout_of(SPMD())) is None
        assert within.model.balances
        assert within.loss.is_mean is not is_refused
        # Sums of squares have larger gradients, and overflowed values prove nothing.
        assert (within.optimizer.lr < training.optimizer.lr) is (is_refused and not training.loss.is_linear)
        assert limit_reason(training, layout_of(SPMD(), 1)) is None


@pytest.mark.torch(">=2.11,<2.12", "other versions add them")
def test_a_load_balancing_loss_next_to_a_mean_fails_on_every_rank() -> None:
    """Beyond the limit, each rank raises."""
    verdict = check(Scenario(training=BALANCED, layout=layout_of(SPMD())), beyond=True)
    assert verdict.failure is not None
    assert all("Redistribution from one partial type" in report.error for report in verdict.failure.reports)


@pytest.mark.torch("<2.10", "later versions refuse it")
@pytest.mark.parametrize(("width", "ranks", "expected"), [(3, 2, Difference.VALUE), (4, 3, Difference.NAN)])
def test_cut_features_are_normalised_wrongly(
    width: int, ranks: int, expected: Difference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limit, uneven parts count alike, and that of a rank which has no features is not a number."""
    monkeypatch.setattr(type(kind_of(SPMD())), "limits", ())
    layers = (Layer(width=width), Layer(width=2, norm=Norm.RMS))
    training = Training(model=Model(features=2, layers=layers), data=Data(microbatches=(6,)), loss=Loss.LINEAR_SUM)
    divergence = check(Scenario(training=training, layout=layout_of(*FULLY_SHARDED.parallelisms, ranks))).divergence
    assert divergence is not None
    assert (divergence.tensor, divergence.difference) == ("loss", expected)


@pytest.mark.parametrize("installed", ["2.11.0", "2.12.1"])
@pytest.mark.parametrize("around", [DDP(), Replicate(implementation=Replicator.DDP)], ids=["ddp", "replicate"])
def test_ddp_wraps_no_dtensors_of_stages(around: Parallelism, installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12, stages infer shapes in `no_grad`, and DDP then computes no gradients. `fully_shard` takes its place."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    axes = tuple(Axis(name=name, size=2) for name in ("dp", "pp", "tp"))
    inside = (TensorParallel(plan=(LayerPlan(),) * 2), Pipeline(num_chunks=2))
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(*inside, around))
    training = replace(PLAIN, model=Model(features=2, layers=(Layer(width=2),) * 2), data=Data(microbatches=(8,)))
    is_refused = installed == "2.11.0"
    assert ("DTensors, which have no graph" in (limit_reason(training, layout) or "")) is is_refused
    assert repair_layout(layout) == (replace(layout, parallelisms=(*inside, FSDP2())) if is_refused else layout)
