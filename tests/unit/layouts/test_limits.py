"""Limits of layouts, and their repairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivcheck.layouts.composition.limits import limit_reason, repair_layout, repair_training
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import (
    ASGD,
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    ActivationSharding,
    Adadelta,
    Adafactor,
    Adam,
    AuxiliaryLinear,
    Axis,
    Checkpointing,
    ClipNorm,
    Compile,
    Compression,
    Data,
    Distribution,
    ElementType,
    Execution,
    GatedMLP,
    Head,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    LowPrecision,
    Mesh,
    MixedPrecision,
    Model,
    Muon,
    Norm,
    Parallelism,
    ParameterGroup,
    Pipeline,
    PipelineSchedule,
    Precision,
    Replicate,
    Replicator,
    RMSprop,
    Rprop,
    ShapeOp,
    ShardingStrategy,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.strategies import layouts, trainings
from unit.layouts.plain import PLAIN, layout_of, with_layer

PLANS = st.builds(
    LayerPlan, split=st.sampled_from([Split.COLWISE, Split.ROWWISE]), output=st.sampled_from(list(ActivationSharding))
)


@st.composite
def _tensor_parallel_layouts(draw: st.DrawFn) -> Layout:
    plan = draw(st.lists(PLANS, max_size=4))
    may_be_outside = not plan or plan[-1].output is ActivationSharding.REPLICATED
    plan.append(
        LayerPlan(split=draw(st.sampled_from([split for split in Split if may_be_outside or split is not Split.NOT_IN_PLAN])))
    )
    return layout_of(TensorParallel(plan=tuple(plan)), draw(st.integers(1, 8)))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    training=trainings(),
    layout=st.one_of(layouts(tags=("ddp", "replicate", "fsdp1", "fsdp2", "spmd")), _tensor_parallel_layouts()),
)
def test_a_repaired_training_is_within_every_limit(training: Training, layout: Layout) -> None:
    """Any training, repaired for any layout, is supported, and a second repair changes nothing."""
    nearest = repair_training(training, layout)
    assert limit_reason(nearest, layout) is None
    assert repair_training(nearest, layout) is nearest


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(training=trainings(), layout=layouts())
def test_a_supported_training_is_left_alone(training: Training, layout: Layout) -> None:
    """A repair changes a training only if the training is unsupported."""
    assert (repair_training(training, layout) is training) == (limit_reason(training, layout) is None)


@pytest.mark.parametrize("around", [DDP(), Replicate(), FSDP2()])
def test_tensor_parallelism_is_applied_first(around: Parallelism) -> None:
    """Around a wrapped model it would leave wrong gradients, so the repair applies it first."""
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    plan = TensorParallel(plan=(LayerPlan(), LayerPlan()))
    layout = Layout(mesh=mesh, parallelisms=(around, plan))

    assert "the innermost" in (limit_reason(PLAIN, layout) or "")
    assert repair_layout(layout).parallelisms == (plan, around)


def _with_layers(count: int) -> Training:
    return replace(PLAIN, model=replace(PLAIN.model, layers=(Layer(width=4),) * count))


SCALED = Pipeline(scale_grads=True, num_chunks=2)
SHARED = with_layer(shares=0)
SHARED_FAR = replace(
    PLAIN, model=replace(PLAIN.model, layers=tuple(Layer(width=4, shares=shared) for shared in (None, None, 0, None)))
)
SHARED_IN_A_STAGE = replace(PLAIN, model=replace(PLAIN.model, layers=(Layer(width=4), Layer(width=4), Layer(width=4, shares=1))))
TOKENS = Model(features=4, length=1, source=Tokens(vocabulary=4), layers=(Layer(width=4),), head=Head(tied=True))
TWICE_TIED = replace(PLAIN, model=TOKENS, data=Data(microbatches=(4, 4)))
TWICE_SHARED = replace(SHARED, data=Data(microbatches=(4, 4)))
UNUSED = with_layer(auxiliary=AuxiliaryLinear.NEVER)
CHANGING = with_layer(auxiliary=AuxiliaryLinear.EVEN_STEPS)
FROZEN = with_layer(frozen=True)
CLIPPED = replace(PLAIN, clipping=ClipNorm())
GROUPED = replace(PLAIN, groups=(ParameterGroup(),))
FUSED = replace(PLAIN, optimizer=SGD(implementation=Implementation.FUSED))
RPROP = replace(PLAIN, optimizer=Rprop())
PER_LAYER_1, PER_LAYER_2 = FSDP1(wrapping=Wrapping.PER_LAYER), FSDP2(wrapping=Wrapping.PER_LAYER)
FLAT = FSDP1(use_orig_params=False)
BF16 = MixedPrecision(param=ElementType.BFLOAT16)
WHOLE_PLAN = TensorParallel(plan=(LayerPlan(), LayerPlan()))
REPLICATED = Replicate(implementation=Replicator.FSDP)
REPLICATED_LAYERS = replace(REPLICATED, wrapping=Wrapping.PER_LAYER)
FEATURES_PLAN = TensorParallel(
    plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
)
ROWS_PLAN = TensorParallel(plan=(LayerPlan(output=ActivationSharding.ROWS), LayerPlan()))
ROW_PLAN = TensorParallel(plan=(LayerPlan(split=Split.ROWWISE), LayerPlan()))
FULLY_SHARD = SPMD(distribution=Distribution.FULLY_SHARD)
ADAFACTOR = replace(PLAIN, optimizer=Adafactor())
MATRICES = Model(features=4, layers=(Layer(width=4, bias=False), Layer(width=4, bias=False)))
SCALED_OUTPUTS = replace(PLAIN, model=replace(PLAIN.model, scale=True))
MUON = replace(PLAIN, model=MATRICES, optimizer=Muon())
SHORT_MUON = replace(MUON, model=replace(MATRICES, features=1, layers=(replace(MATRICES.layers[0], width=1), MATRICES.layers[1])))


@pytest.mark.parametrize(
    ("training", "parallelism", "reason"),
    [
        (replace(PLAIN, data=Data(microbatches=(4, 3))), DDP(), "split evenly"),
        (UNUSED, DDP(), "find_unused_parameters"),
        (CHANGING, DDP(), "find_unused_parameters"),
        (CHANGING, DDP(static_graph=True), "static_graph assumes"),
        (PLAIN, DDP(autocast=LowPrecision.BFLOAT16), "does not cast float64"),
        (CLIPPED, FSDP1(), "refuses float64"),
        (SHARED, PER_LAYER_1, "share a weight"),
        (FROZEN, FLAT, "both frozen and trained"),
        (GROUPED, FLAT, "several groups"),
        (UNUSED, FSDP1(), "gradient of zeros"),
        (TWICE_SHARED, FSDP1(strategy=ShardingStrategy.NO_SHARD, mixed_precision=BF16, no_sync=True), "cannot be kept in"),
        (TWICE_TIED, FSDP1(strategy=ShardingStrategy.NO_SHARD, mixed_precision=BF16, no_sync=True), "cannot be kept in"),
        (SHARED, PER_LAYER_2, "share a weight"),
        (UNUSED, Replicate(), "take part in every step"),
        (SHARED, REPLICATED_LAYERS, "share a weight"),
        (RPROP, REPLICATED, "Rprop"),
        (RPROP, FSDP2(), "Rprop"),
        (FUSED, SPMD(), "aten._fused_sgd_"),
        (RPROP, WHOLE_PLAN, "Rprop"),
        (PLAIN, TensorParallel(), "one entry for each layer"),
        (SHARED, WHOLE_PLAN, "unties shared weights"),
        (with_layer(norm=Norm.RMS), FEATURES_PLAN, "needs all features of a row"),
        (with_layer(residual=True), FEATURES_PLAN, "a residual around"),
        (with_layer(index=0, shape_op=ShapeOp.ARANGE), FEATURES_PLAN, "first feature's index"),
        (with_layer(index=0, width=3), FEATURES_PLAN, "features that are sharded between layers"),
        (replace(PLAIN, data=Data(microbatches=(3,))), ROWS_PLAN, "rows, or positions of sequences"),
        (_with_layers(1), Pipeline(), "at least one layer"),
        (_with_layers(2), Pipeline(boundaries=(2,)), "at least one layer"),
        (
            SHARED_FAR,
            replace(SCALED, schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=2),
            "a weight that two stages on one rank share",
        ),
        (replace(PLAIN, data=Data(microbatches=(4, 3))), Pipeline(num_chunks=2), "a multiple of the chunks"),
        (replace(PLAIN, data=Data(microbatches=(4,), batch_dim=1)), Pipeline(), "along dim 0"),
        (replace(PLAIN, model=replace(PLAIN.model, counter=True)), Pipeline(), "counts forward passes"),
        (replace(PLAIN, data=Data(microbatches=(4, 4))), SCALED, "gradients accumulated before"),
        (replace(PLAIN, loss=Loss.MSE_SUM), SCALED, "a sum loss"),
        (replace(PLAIN, loss=Loss.LINEAR_SUM), SCALED, "a sum loss"),
        (ADAFACTOR, FSDP1(), "the shapes that it needs"),
        (ADAFACTOR, FSDP1(strategy=ShardingStrategy.NO_SHARD, use_orig_params=False), "the shapes that it needs"),
        (ADAFACTOR, FSDP2(), "Adafactor on sharded parameters"),
        (ADAFACTOR, FULLY_SHARD, "Adafactor on sharded parameters"),
        (ADAFACTOR, FEATURES_PLAN, "Adafactor on sharded parameters"),
        (MUON, FSDP1(), "the shapes that it needs"),
        (SCALED_OUTPUTS, FSDP1(), "FSDP doesn't support scalar parameters"),
        (SCALED_OUTPUTS, FSDP1(strategy=ShardingStrategy.NO_SHARD), "FSDP doesn't support scalar parameters"),
        (SCALED_OUTPUTS, FSDP2(), "fully_shard doesn't support scalar parameters"),
        (SCALED_OUTPUTS, REPLICATED, "replicate_with_fsdp: a scalar parameter"),
        (SHORT_MUON, FSDP2(), "Muon with a sharded dim shorter"),
        (SHORT_MUON, FULLY_SHARD, "Muon with a sharded dim shorter"),
        (SHORT_MUON, ROW_PLAN, "Muon with a sharded dim shorter"),
    ],
)
@pytest.mark.usefixtures("of_torch_213")
def test_what_a_layout_cannot_run_has_a_reason(training: Training, parallelism: Parallelism, reason: str) -> None:
    """A training with one feature meets each limit, and the repair removes that feature."""
    layout = layout_of(parallelism)
    assert reason in (limit_reason(training, layout) or "")
    assert limit_reason(repair_training(training, layout), layout) is None


@pytest.mark.parametrize(("hidden", "length", "is_limit"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_one_feature_of_one_position_is_not_cut(hidden: int, length: int, is_limit: bool) -> None:
    """On one rank or several, DTensor takes the feature dim for the position dim."""
    training = replace(PLAIN, model=Model(features=4, length=length, layers=(GatedMLP(hidden=hidden),)))
    layout = layout_of(TensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),)), size=1)
    assert ("below 2 with one position" in (limit_reason(training, layout) or "")) == is_limit
    assert limit_reason(repair_training(training, layout), layout) is None


def _over_tp(parallelism: Parallelism, plan: TensorParallel, sizes: tuple[int, ...] = (2, 2)) -> Layout:
    names = (*next(names for names in parallelism.axes if len(names) == len(sizes) - 1), "tp")
    axes = tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True))
    return Layout(mesh=Mesh(axes=axes), parallelisms=(plan, parallelism))


SPLIT_PLAN = TensorParallel(plan=(LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.ROWWISE)))
COLUMN_PLAN = TensorParallel(plan=(LayerPlan(), LayerPlan(split=Split.COLWISE)))
OUTSIDE_PLAN = TensorParallel(plan=(LayerPlan(), LayerPlan(split=Split.NOT_IN_PLAN)))
NARROW = with_layer(index=0, width=1)
FOREACH = replace(PLAIN, optimizer=SGD(implementation=Implementation.FOREACH))


@pytest.mark.parametrize(
    ("training", "layout", "reason"),
    [
        (replace(PLAIN, data=Data(microbatches=(3,))), _over_tp(FSDP2(), WHOLE_PLAN), "split evenly"),
        (replace(PLAIN, data=Data(microbatches=(2,))), _over_tp(DDP(), ROWS_PLAN), "rows, or positions of sequences"),
        (with_layer(auxiliary=AuxiliaryLinear.NEVER, frozen=True), _over_tp(DDP(), WHOLE_PLAN), "find_unused_parameters"),
        (
            with_layer(auxiliary=AuxiliaryLinear.EVEN_STEPS, frozen=True),
            _over_tp(DDP(static_graph=True), WHOLE_PLAN),
            "static_graph assumes",
        ),
        (replace(CLIPPED, precision=Precision.FLOAT32), _over_tp(FSDP1(), SPLIT_PLAN), "clips by another norm"),
        (NARROW, _over_tp(FSDP2(), SPLIT_PLAN), "_chunk_cat"),
        (
            with_layer(norm=Norm.RMS, frozen=True),
            _over_tp(FSDP1(use_orig_params=False, wrapping=Wrapping.PER_LAYER), ROWS_PLAN),
            "both frozen and trained",
        ),
        (FOREACH, layout_of(OUTSIDE_PLAN), "outside the plan"),
        (replace(PLAIN, optimizer=ASGD(implementation=Implementation.FOREACH)), _over_tp(FSDP2(), OUTSIDE_PLAN), "two meshes"),
    ],
)
def test_what_a_composition_cannot_run_has_a_reason(training: Training, layout: Layout, reason: str) -> None:
    """A training with one feature meets each limit of a composition, and the repair removes that feature."""
    assert reason in (limit_reason(training, layout) or "")
    assert limit_reason(repair_training(training, layout), layout) is None


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        (with_layer(auxiliary=AuxiliaryLinear.NEVER, frozen=True), _over_tp(FSDP2(), WHOLE_PLAN)),
        (replace(CLIPPED, precision=Precision.FLOAT32), _over_tp(FSDP1(), SPLIT_PLAN, (2, 1))),
        (replace(CLIPPED, precision=Precision.FLOAT32), _over_tp(FSDP1(), WHOLE_PLAN)),
        (CLIPPED, _over_tp(DDP(), SPLIT_PLAN)),
        (NARROW, _over_tp(DDP(), SPLIT_PLAN)),
        (with_layer(index=0, width=1, frozen=True), _over_tp(FSDP2(), SPLIT_PLAN, (2, 1))),
        (with_layer(width=3), _over_tp(FSDP1(), COLUMN_PLAN)),
        (with_layer(width=3), _over_tp(FLAT, COLUMN_PLAN)),
        (
            with_layer(norm=Norm.RMS, frozen=True),
            _over_tp(FSDP1(use_orig_params=False, wrapping=Wrapping.PER_LAYER), WHOLE_PLAN),
        ),
        (with_layer(width=3), _over_tp(FLAT, SPLIT_PLAN)),
        (FOREACH, _over_tp(FSDP2(), OUTSIDE_PLAN)),
        (FOREACH, layout_of(WHOLE_PLAN)),
        (RPROP, _over_tp(DDP(), SPLIT_PLAN)),
        (FUSED, _over_tp(FSDP1(), OUTSIDE_PLAN)),
    ],
)
def test_limits_of_compositions_are_no_wider_than_they_must_be(training: Training, layout: Layout) -> None:
    """A training next to such a limit stays supported."""
    assert limit_reason(training, layout) is None


@pytest.mark.parametrize(
    ("parallelism", "sizes", "mended_to"),
    [
        (FSDP1(strategy=ShardingStrategy.NO_SHARD), (2, 2), {"use_orig_params": False}),
        (FSDP1(), (1, 2), {"use_orig_params": False}),
        (FSDP1(strategy=ShardingStrategy.HYBRID_SHARD, no_sync=True), (2, 1, 2), {"use_orig_params": False}),
        (FSDP1(no_sync=True), (2, 2), {"no_sync": False}),
        (FSDP1(no_sync=True, use_orig_params=False), (1, 2), {}),
    ],
)
def test_options_that_do_not_go_together_have_a_reason(
    parallelism: FSDP1, sizes: tuple[int, ...], mended_to: dict[str, object]
) -> None:
    """A layout beyond a limit supports no training, and its repair changes only that option."""
    layout = _over_tp(parallelism, WHOLE_PLAN, sizes)
    assert ("over tensor parallelism: use_orig_params" in (limit_reason(PLAIN, layout) or "")) == bool(mended_to)
    assert repair_layout(layout).parallelisms == (WHOLE_PLAN, replace(parallelism, **mended_to))
    assert limit_reason(PLAIN, repair_layout(layout)) is None


@pytest.mark.parametrize(
    ("training", "parallelism"),
    [
        (UNUSED, DDP(find_unused_parameters=True)),
        (UNUSED, DDP(static_graph=True)),
        (replace(CHANGING, steps=1), DDP()),
        (with_layer(auxiliary=AuxiliaryLinear.NEVER, frozen=True), DDP()),
        (SHARED, DDP()),
        (SHARED, FSDP1()),
        (SHARED, FSDP2()),
        (SHARED, SPMD()),
        (FROZEN, FSDP1()),
        (FROZEN, FSDP1(use_orig_params=False, wrapping=Wrapping.PER_LAYER)),
        (GROUPED, FSDP1()),
        (TWICE_SHARED, FSDP1(mixed_precision=BF16, no_sync=True)),
        (SHARED, FSDP1(strategy=ShardingStrategy.NO_SHARD, mixed_precision=BF16, no_sync=True)),
        (CLIPPED, FSDP1(strategy=ShardingStrategy.NO_SHARD)),
        (replace(CLIPPED, precision=Precision.FLOAT32), FSDP1()),
        (CHANGING, FSDP2()),
        (replace(PLAIN, precision=Precision.FLOAT32), DDP(autocast=LowPrecision.FLOAT16)),
        (PLAIN, DDP(compression=Compression.FP16)),
        (FUSED, DDP()),
        (FUSED, Replicate()),
        (RPROP, Replicate()),
        (SHARED, Replicate()),
        (SHARED, REPLICATED),
        (CHANGING, REPLICATED),
        (RPROP, FSDP1()),
        (with_layer(index=0, shape_op=ShapeOp.ARANGE), ROWS_PLAN),
        (with_layer(index=0, shape_op=ShapeOp.ONES), FEATURES_PLAN),
        (replace(PLAIN, data=Data(microbatches=(4, 4))), replace(SCALED, scale_grads=False)),
        (replace(PLAIN, data=Data(microbatches=(4, 4))), replace(SCALED, num_chunks=1)),
        (replace(PLAIN, loss=Loss.MSE_SUM), replace(SCALED, num_chunks=1)),
        (replace(PLAIN, data=Data(microbatches=(4, 2))), Pipeline(num_chunks=2)),
        (SHARED_IN_A_STAGE, Pipeline(boundaries=(1,))),
        (ADAFACTOR, DDP()),
        (ADAFACTOR, SPMD()),
        (ADAFACTOR, WHOLE_PLAN),
        (ADAFACTOR, FSDP1(strategy=ShardingStrategy.NO_SHARD)),
        (MUON, DDP()),
        (MUON, FSDP2()),
        (MUON, FULLY_SHARD),
        (MUON, FEATURES_PLAN),
        (SHORT_MUON, SPMD()),
        (SHORT_MUON, WHOLE_PLAN),
        (with_layer(norm=Norm.RMS, residual=True), ROWS_PLAN.__class__(plan=(LayerPlan(), LayerPlan()))),
    ],
)
@pytest.mark.usefixtures("of_torch_213")
def test_limits_are_no_wider_than_they_must_be(training: Training, parallelism: Parallelism) -> None:
    """A training next to a limit stays supported."""
    assert limit_reason(training, layout_of(parallelism)) is None


@pytest.mark.parametrize(
    ("parallelism", "plain"),
    [
        (DDP(compression=Compression.FP16), DDP()),
        (DDP(autocast=LowPrecision.BFLOAT16), DDP()),
        (FSDP1(mixed_precision=BF16), FSDP1()),
        (FSDP2(mixed_precision=BF16), FSDP2()),
    ],
)
def test_lower_precision_goes_with_no_tensor_parallelism(parallelism: Parallelism, plain: Parallelism) -> None:
    """Ranks round their parts of a sum, so the layout is beyond its limits until the option is off."""
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(WHOLE_PLAN, parallelism))
    assert "rounds its partial sum" in (limit_reason(replace(PLAIN, precision=Precision.FLOAT32), layout) or "")
    assert repair_layout(layout) == replace(layout, parallelisms=(WHOLE_PLAN, plain))


@pytest.mark.parametrize(
    ("sizes", "factor", "policy", "sums"),
    [
        ((4,), 3.0, None, True),
        ((4,), 4.0, None, False),
        ((4,), 3.0, MixedPrecision(reduce=ElementType.FLOAT16), False),
        ((4,), 3.0, MixedPrecision(param=ElementType.FLOAT16, reduce=ElementType.FLOAT32), True),
        ((2, 2), 3.0, None, True),
    ],
)
def test_another_divisor_than_the_ranks_that_average_is_divided_by_apart(
    sizes: tuple[int, ...], factor: float, policy: MixedPrecision | None, *, sums: bool
) -> None:
    """Gloo has no premultiplied sum; gradients in types that overflow easily are never averaged."""
    axes = tuple(Axis(name=name, size=size) for name, size in zip(FSDP2.axes[len(sizes) - 1], sizes, strict=True))
    fsdp = FSDP2(gradient_divide_factor=factor, mixed_precision=policy)
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(fsdp,))
    assert ("premultiplied" in (limit_reason(replace(PLAIN, data=Data(microbatches=(4,))), layout) or "")) is sums
    assert repair_layout(layout) == replace(layout, parallelisms=(replace(fsdp, sum_reductions=sums),))


@pytest.mark.parametrize(("shards", "to", "kept"), [(4, 2, True), (6, 3, True), (4, 3, False), (4, 4, False), (2, 4, False)])
def test_parameters_are_resharded_to_equal_groups_of_ranks(shards: int, to: int, *, kept: bool) -> None:
    """Their size is smaller than the number of shards and divides it."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=shards),)), parallelisms=(FSDP2(reshard_to=to),))
    assert (repair_layout(layout) == layout) is kept


def test_dtensors_are_not_resharded_to_fewer_ranks() -> None:
    """Tensor parallelism leaves DTensor parameters, so reshard_to is unsupported."""
    mesh = Mesh(axes=(Axis(name="dp", size=4), Axis(name="tp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(WHOLE_PLAN, FSDP2(reshard_to=2)))
    assert "cannot be resharded" in (limit_reason(replace(PLAIN, data=Data(microbatches=(4,))), layout) or "")
    assert repair_layout(layout) == replace(layout, parallelisms=(WHOLE_PLAN, FSDP2()))


def test_a_compiled_model_keeps_its_precision() -> None:
    """A compiler need not round between fused operations; compressed gradients are not in the graph."""
    compiled = Execution(compile=Compile.AOT_EAGER)
    layout = replace(layout_of(FSDP2(mixed_precision=BF16)), execution=compiled)
    assert "may round at other places" in (limit_reason(PLAIN, layout) or "")
    assert repair_layout(layout) == replace(layout_of(FSDP2()), execution=compiled)
    assert limit_reason(PLAIN, replace(layout_of(DDP(compression=Compression.FP16)), execution=compiled)) is None


def test_the_bf16_hook_is_for_no_cpu() -> None:
    """DDP refuses the bf16 hook on CPU, so it is unsupported, and the repair takes the fp16 hook."""
    for kind in (DDP, Replicate):
        layout = layout_of(kind(compression=Compression.BF16))
        assert "refused without CUDA and NCCL" in (limit_reason(PLAIN, layout) or "")
        assert repair_layout(layout) == layout_of(kind(compression=Compression.FP16))


@pytest.mark.parametrize(
    ("width", "outer", "reason"),
    [(4, DDP(), "never sees a full one"), (6, FSDP2(), None), (4, FSDP2(), None), (3, FSDP2(), "Muon with a sharded dim")],
)
def test_muon_over_tensor_parallelism(width: int, outer: Parallelism, reason: str | None) -> None:
    """Muon runs with FSDP2 over tensor parallelism if each rank has a shard, but not if local tensors are trained."""
    plan = (LayerPlan(split=Split.COLWISE), LayerPlan())
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(TensorParallel(plan=plan), outer))
    layers = (replace(MATRICES.layers[0], width=width), MATRICES.layers[1])
    found = limit_reason(replace(MUON, model=replace(MATRICES, layers=layers)), layout)
    assert found is reason or (reason is not None and reason in (found or ""))


TRACED = Execution(whole_step=True)


@pytest.mark.usefixtures("of_torch_213")
def test_a_graph_counts_no_steps() -> None:
    """In a traced step, an optimizer that reads its step count is replaced, by a fused one if possible."""
    adam, eager = replace(PLAIN, optimizer=Adam(implementation=Implementation.FOREACH)), layout_of(SPMD())
    traced, over_tp = (replace(layout, execution=TRACED) for layout in (eager, layout_of(WHOLE_PLAN)))
    assert limit_reason(adam, eager) is None
    assert "step count" in (limit_reason(adam, traced) or "")
    assert repair_training(adam, traced).optimizer == Adam(implementation=Implementation.FUSED)
    assert repair_training(adam, over_tp).optimizer == SGD(lr=adam.optimizer.lr)
    assert repair_training(replace(PLAIN, optimizer=Adam()), traced).optimizer == SGD(lr=adam.optimizer.lr)
    for optimizer in (SGD(momentum=0.5), RMSprop(), Adadelta(), Adam(implementation=Implementation.FUSED)):
        assert limit_reason(replace(PLAIN, optimizer=optimizer), traced) is None


def test_buckets_of_unequal_parts_are_no_views() -> None:
    """Behind parts of unequal size parameters are aligned otherwise on each rank, and products rounded otherwise."""
    views = DDP(zero_redundancy=True, parameters_as_bucket_view=True)
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    column, outside = LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.NOT_IN_PLAN)
    over_tp = Layout(mesh=mesh, parallelisms=(TensorParallel(plan=(column, outside)), views))
    whole = replace(over_tp, parallelisms=(TensorParallel(plan=(outside, outside)), views))
    copies = replace(over_tp, parallelisms=(over_tp.parallelisms[0], replace(views, parameters_as_bucket_view=False)))
    odd, even = (replace(PLAIN, model=Model(features=4, layers=(Layer(width=width), Layer(width=2)))) for width in (5, 6))

    assert "rounds their products" in (limit_reason(odd, over_tp) or "")
    assert limit_reason(even, over_tp) is None
    assert limit_reason(odd, whole) is None
    assert limit_reason(odd, copies) is None
    assert repair_training(odd, over_tp) == even


def test_hooks_are_in_no_graph() -> None:
    """A step can be traced only if operations do all the work."""
    layout = replace(layout_of(FSDP2()), execution=TRACED)
    assert "parallelisms with hooks" in (limit_reason(PLAIN, layout) or "")
    assert repair_layout(layout) == layout_of(FSDP2())
    assert repair_layout(replace(layout_of(SPMD()), execution=TRACED)).execution == TRACED


def test_no_layer_runs_twice_in_a_graph() -> None:
    """Traced steps leave activation checkpointing and offload out."""
    layout = replace(layout_of(SPMD()), execution=replace(TRACED, checkpointing=Checkpointing.EVERY_LAYER))
    assert "activation checkpointing or offload" in (limit_reason(PLAIN, layout) or "")
    assert repair_layout(layout).execution == TRACED


def test_offloading_layers_are_not_compiled() -> None:
    """Dynamo would run them eagerly."""
    for compiled in (Execution(compile=Compile.AOT_EAGER), Execution(compiled_autograd=True)):
        layout = replace(layout_of(DDP()), execution=replace(compiled, checkpointing=Checkpointing.OFFLOAD))
        assert "does not trace `save_on_cpu`" in (limit_reason(PLAIN, layout) or "")
        assert repair_layout(layout).execution == replace(compiled, checkpointing=Checkpointing.EVERY_LAYER)


def test_rows_beyond_the_largest_microbatch_are_rounded_down() -> None:
    """A microbatch that would grow beyond 64 rows shrinks to the nearest multiple."""
    layout = layout_of(DDP(), size=7)
    nearest = repair_training(replace(PLAIN, data=Data(microbatches=(64, 1))), layout)
    assert nearest.data.microbatches == (63, 7)


def test_each_limit_of_a_kind_has_a_reason_of_its_own() -> None:
    """Reasons tell limits apart."""
    for parallelism in (DDP(), Replicate(), FSDP1(), FSDP2(), SPMD(), TensorParallel(), Pipeline()):
        reasons = [limit.reason for limit in kind_of(parallelism).limits]
        assert len(set(reasons)) == len(reasons)
