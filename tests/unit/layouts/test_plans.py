"""Legal plans for tensor parallelism."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from equivcheck.errors import InvalidScenario
from equivcheck.layouts.base.plan.rules import ALL_PLANS, LayerSite, legal_plans
from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.scenario import (
    ActivationSharding,
    AnyLayer,
    Axis,
    Data,
    GatedMLP,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Norm,
    Split,
    TensorParallel,
    Training,
)

LAYERS = st.lists(
    st.builds(Layer, width=st.sampled_from([2, 3, 4]), norm=st.sampled_from([None, Norm.LAYER])), min_size=1, max_size=3
)


@st.composite
def _models(draw: st.DrawFn) -> Model:
    layers = draw(LAYERS)
    features = draw(st.sampled_from([2, 3, 4]))
    inputs = (features, *(layer.width for layer in layers))
    drawn = [
        Layer(width=layer.width, norm=layer.norm, residual=layer.width == width and draw(st.booleans()))
        for layer, width in zip(layers, inputs, strict=False)
    ]
    mixed = [GatedMLP(hidden=12, norm=layer.norm) if draw(st.booleans()) else layer for layer in drawn]
    return Model(features=features, layers=tuple(drawn if draw(st.booleans()) else _meeting(features, mixed)))


def _meeting(features: int, layers: list[AnyLayer]) -> list[AnyLayer]:
    """Layers without residuals of other widths; a gated MLP has as many outputs as inputs."""
    found: list[AnyLayer] = []
    for layer in layers:
        found.append(layer if layer.out_features(features) == features else layer.with_fields(residual=False))
        features = layer.out_features(features)
    return found


def _site(model: Model, index: int, sharding: ActivationSharding, tp: int, rows: tuple[int, ...]) -> LayerSite:
    return LayerSite(model=model, index=index, input=sharding, tp=tp, rows=rows)


def _drawable(model: Model, tp: int, rows: tuple[int, ...]) -> set[tuple[LayerPlan, ...]]:
    """All plans that can be drawn layer by layer."""
    partial: list[tuple[tuple[LayerPlan, ...], ActivationSharding]] = [((), ActivationSharding.REPLICATED)]
    for index in range(len(model.layers)):
        partial = [
            ((*done, plan), plan.output)
            for done, sharding in partial
            for plan in legal_plans(_site(model, index, sharding, tp, rows))
        ]
    return {done for done, _ in partial}


@given(model=_models(), tp=st.integers(1, 4), rows=st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple))
def test_plans_drawn_layer_by_layer_are_those_that_the_layout_supports(model: Model, tp: int, rows: tuple[int, ...]) -> None:
    """Drawing legal plans in order reaches every supported plan of the whole model, and no other."""
    training, mesh = Training(model=model, data=Data(microbatches=rows)), Mesh(axes=(Axis(name="tp", size=tp),))
    supported = {
        parallelism.plan
        for parallelism in filter(None, map(_parallelism, product(ALL_PLANS, repeat=len(model.layers))))
        if limit_reason(training, Layout(mesh=mesh, parallelisms=(parallelism,))) is None
    }
    assert _drawable(model, tp, rows) == supported


def _parallelism(plan: tuple[LayerPlan, ...]) -> TensorParallel | None:
    """A `TensorParallel` for a plan, or None if the plan is invalid."""
    try:
        return TensorParallel(plan=plan)
    except InvalidScenario:
        return None


def test_uneven_widths_can_be_split_where_torch_cuts_them_itself() -> None:
    """A width that is not a multiple of the ranks may be split by columns or rows if the layer's output is replicated."""
    model = Model(features=3, layers=(Layer(width=1),))
    assert {plan.split for plan in legal_plans(_site(model, 0, ActivationSharding.REPLICATED, 2, (1,)))} == set(Split) - {
        Split.HEADS_OR_HIDDEN
    }


def test_every_plan_is_legal_on_one_rank_for_a_plain_layer_that_is_not_the_last() -> None:
    """On an axis with one rank, every plan is legal for a plain layer before the last."""
    model = Model(features=3, layers=(Layer(width=5), Layer(width=1)))
    of_linears = tuple(plan for plan in ALL_PLANS if plan.split is not Split.HEADS_OR_HIDDEN)
    assert legal_plans(_site(model, 0, ActivationSharding.REPLICATED, 1, (3,))) == of_linears


def test_the_last_layer_leaves_its_output_whole() -> None:
    """The last layer's output is replicated, because the loss needs it."""
    model = Model(features=4, layers=(Layer(width=4),))
    assert {plan.output for plan in legal_plans(_site(model, 0, ActivationSharding.ROWS, 2, (4,)))} == {
        ActivationSharding.REPLICATED
    }
