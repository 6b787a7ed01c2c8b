"""Gradients in the placements that propagation chose: limits cover torch's refusals, and all else is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from equivcheck import Outcome, check
from equivcheck.checking.beyond import raised_on_every_rank
from equivcheck.layouts.base.limits.propagated_gradients import REFUSED_IN_PLACE
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import repair_layout, why_unsupported
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import (
    FSDP2,
    SGD,
    SPMD,
    ActivationSharding,
    Adam,
    Adamax,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    Distribution,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    ParameterGroup,
    ParameterSelection,
    Scenario,
    Split,
    TensorParallel,
    Training,
    ZeroGrad,
)
from equivcheck.system.torch_version import is_torch_in

BY_ROWS = TensorParallel(
    plan=(
        LayerPlan(output=ActivationSharding.ROWS),
        LayerPlan(output=ActivationSharding.ROWS),
        LayerPlan(),
    ),
    redistribute_gradients=False,
)
BY_COLUMNS = TensorParallel(plan=(LayerPlan(split=Split.COLWISE), LayerPlan(), LayerPlan()), redistribute_gradients=False)
REPLICATED = SPMD(redistribute_gradients=False)
SHARDED = SPMD(distribution=Distribution.FULLY_SHARD, redistribute_gradients=False)
SCALED = Model(features=4, layers=(Layer(width=4),), scale=True)
"""Model with a scale, which is replicated although all other parameters are sharded."""


def scenario(parallelism: Parallelism, *, width: int = 4, ranks: int = 4, **changes: object) -> Scenario:
    """Three layers on four ranks, in two steps."""
    norm = Norm.LAYER if isinstance(parallelism, TensorParallel) else None
    layers = (Layer(width=width), Layer(width=8, norm=norm), Layer(width=4))
    values: dict[str, object] = {
        "model": Model(features=4, layers=layers),
        "data": Data(microbatches=(8,)),
        "loss": Loss.LINEAR_SUM,
        "steps": 2,
        "optimizer": SGD(momentum=0.9),
    }
    axis = Axis(name=parallelism.axes[0][0], size=ranks)
    layout = Layout(mesh=Mesh(axes=(axis,)), parallelisms=(parallelism,))
    return Scenario(training=Training(**(values | changes)), layout=layout)  # type: ignore[arg-type]


def refused() -> Iterator[Scenario]:
    """One or two scenarios for each limit."""
    foreach = Implementation.FOREACH
    for parallelism in (BY_COLUMNS, SHARDED):
        yield scenario(parallelism, width=3)
    for parallelism in (BY_ROWS, SHARDED):
        for ranks in (1, 4):
            yield scenario(parallelism, ranks=ranks, clipping=ClipValue(clip_value=0.1))
            yield scenario(parallelism, ranks=ranks, optimizer=Adam(implementation=Implementation.FUSED), zero_grad=ZeroGrad.ZERO)
            yield scenario(parallelism, ranks=ranks, optimizer=Adamax(implementation=foreach, maximize=True))
    yield scenario(REPLICATED, optimizer=Adamax(implementation=foreach, weight_decay=0.1))
    yield scenario(SHARDED, optimizer=Adamax(implementation=foreach, weight_decay=0.1), model=SCALED)
    yield scenario(SHARDED, optimizer=Adam(implementation=foreach, weight_decay=0.1, maximize=True))


@pytest.mark.parametrize("beyond", tuple(refused()))
def test_what_torch_refuses_is_declared_and_repaired(beyond: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit every rank raises, or numbers are wrong if this torch does not refuse; the repaired training is right.

    The repair keeps the layout.
    """
    if why_unsupported(beyond) is not None:
        with monkeypatch.context() as without:
            without.setattr(type(kind_of(*beyond.layout.parallelisms)), "limits", ())
            verdict = check(beyond)
        assert raised_on_every_rank(verdict) if is_torch_in(REFUSED_IN_PLACE) else verdict.outcome is Outcome.DIVERGED

    within = fit_scenario(beyond)

    assert within is not None
    assert within.layout == beyond.layout
    assert check(within).outcome is Outcome.EQUIVALENT


def test_one_rank_has_no_shards_to_add() -> None:
    """With one shard, shards can become partial sums, so the scenario is supported and right."""
    alone = scenario(SHARDED, ranks=1, optimizer=Adam(implementation=Implementation.FOREACH, weight_decay=0.1, maximize=True))
    assert why_unsupported(alone) is None
    assert check(alone).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("model", [SCALED, replace(SCALED, scale=False)])
def test_weight_decay_of_shards_leaves_nothing_pending(model: Model) -> None:
    """Weight decay on shards leaves no partial gradient; a replicated scale belongs to groups without weight decay."""
    optimizer = Adamax(implementation=Implementation.FOREACH)
    decaying = scenario(
        SHARDED,
        optimizer=optimizer,
        groups=(ParameterGroup(select=ParameterSelection.FIRST_LAYER, weight_decay=0.1),),
        model=model,
    )
    assert why_unsupported(decaying) is None
    assert check(decaying).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("parallelism", [BY_ROWS, BY_COLUMNS, REPLICATED, SHARDED])
def test_the_rest_is_right_and_redistributing_makes_no_difference(parallelism: TensorParallel | SPMD) -> None:
    """Gradients and momentum are right in their parameters' placements; clipping partial ones is a known issue before 2.12.

    Calls are predicted only if no gradient is partial.
    """
    left = scenario(parallelism, clipping=ClipNorm(max_norm=0.1))
    redistributed = scenario(replace(parallelism, redistribute_gradients=True), clipping=ClipNorm(max_norm=0.1))

    verdicts = check(left), check(redistributed)

    for verdict in verdicts:
        verdict.assert_no_finding()
    assert ("partial gradients" in verdicts[0].unmodelled) == (parallelism not in (BY_COLUMNS, SHARDED))
    assert (verdicts[1].unmodelled == "") == (parallelism != SHARDED)


def test_hooks_are_told_to_stay_where_another_parallelism_replaces_parameters() -> None:
    """Around tensor parallelism, redistribute_gradients has no effect and is not drawn."""
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(TensorParallel(redistribute_gradients=False), FSDP2()))
    assert repair_layout(layout) == replace(layout, parallelisms=(TensorParallel(), FSDP2()))
