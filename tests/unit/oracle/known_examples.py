"""The smallest scenarios that show the upstream issues on file, and some near them that show nothing."""

from dataclasses import replace

from equivcheck import Scenario
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    ActivationSharding,
    Adafactor,
    AdamW,
    AuxiliaryLinear,
    Axis,
    ClipNorm,
    ClipValue,
    Compile,
    Compression,
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
    Muon,
    Norm,
    NormType,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Precision,
    Recompute,
    Replicate,
    Replicator,
    Resume,
    ShapeOp,
    ShardingStrategy,
    Split,
    TensorParallel,
    Training,
    Wrapping,
    ZeroGrad,
)

INF, FLOAT32 = ClipNorm(norm_type=NormType.INF), Precision.FLOAT32
FULLY_SHARD = SPMD(distribution=Distribution.FULLY_SHARD)
AS_PROPAGATED = SPMD(redistribute_gradients=False)
HYBRID = FSDP1(strategy=ShardingStrategy.HYBRID_SHARD)
ONE_WEIGHT = Layer(width=1, bias=False)
COLUMN = TensorParallel(plan=(LayerPlan(split=Split.COLUMN),))
REPLICATED = Replicate(implementation=Replicator.FSDP)
PER_LAYER = FSDP1(wrapping=Wrapping.PER_LAYER)
FROZEN = Layer(width=1, bias=False, frozen=True)
TWO_OUTPUTS = Layer(width=2)
ROWS = TensorParallel(plan=(LayerPlan(output=ActivationSharding.ROWS), LayerPlan()))
WHOLE = TensorParallel(plan=(LayerPlan(), LayerPlan()))
COLUMN_FIRST = TensorParallel(plan=(LayerPlan(split=Split.COLUMN), LayerPlan()))


def scenario(parallelism: Parallelism, *layers: Layer, sizes: tuple[int, ...] = (2,), features: int = 1, **changes) -> Scenario:
    """A scenario with as many rows as ranks and a sum loss, unless something else is said."""
    names = next(names for names in parallelism.axes if len(names) == len(sizes))
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    fields = {"data": Data(microbatches=(mesh.num_ranks,)), "loss": Loss.MSE_SUM} | changes
    training = Training(model=Model(features=features, layers=layers or (ONE_WEIGHT,)), **fields)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(parallelism,)))


def traced(scenario: Scenario) -> Scenario:
    """The scenario with each step as one graph."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(whole_step=True)))


def scaled(scenario: Scenario) -> Scenario:
    """The scenario with a scale of the model's outputs."""
    model = replace(scenario.training.model, scale=True)
    return replace(scenario, training=replace(scenario.training, model=model))


def compiled(scenario: Scenario, backend: Compile = Compile.AOT_EAGER) -> Scenario:
    """The scenario with a compiled forward."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(compile=backend)))


def compiled_layers(scenario: Scenario) -> Scenario:
    """The same, each layer compiled by itself."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(compile=Compile.AOT_EAGER, per_layer=True)))


def with_checkpoints(scenario: Scenario) -> Scenario:
    """The same, each layer computed once more in backward."""
    layout = scenario.layout
    return replace(scenario, layout=replace(layout, execution=replace(layout.execution, checkpointing=Recompute.EVERY_LAYER)))


def over_tp(parallelism: Parallelism, *layers: Layer, tp: int = 1, split: Split = Split.REPLICATED, **changes) -> Scenario:
    """A scenario on two data ranks for each of `tp` tensor-parallel ones, all linears split alike."""
    alone = scenario(parallelism, *layers, **changes)
    mesh = Mesh(axes=(*alone.layout.mesh.axes, Axis(name="tp", size=tp)))
    plan = TensorParallel(plan=(LayerPlan(split=split),) * len(layers))
    return replace(alone, layout=Layout(mesh=mesh, parallelisms=(plan, parallelism)))


def around_plan(scenario: Scenario) -> Scenario:
    """The scenario with its first layer outside the tensor-parallel plan."""
    parallel, *others = scenario.layout.parallelisms
    assert isinstance(parallel, TensorParallel)
    plan = (LayerPlan(split=Split.OUTSIDE), *parallel.plan[1:])
    return replace(scenario, layout=replace(scenario.layout, parallelisms=(replace(parallel, plan=plan), *others)))


def first_cut(
    layer: Layer, *around: Parallelism, split: Split = Split.COLUMN, second: Layer = TWO_OUTPUTS, **changes: object
) -> Scenario:
    """Two tensor-parallel ranks that share the first of two layers."""
    names = ("dp", "tp") if around else ("tp",)
    mesh = Mesh(axes=tuple(Axis(name=name, size=1 + (name == "tp")) for name in names))
    plan = TensorParallel(plan=(LayerPlan(split=split), LayerPlan(split=Split.OUTSIDE)))
    training = Training(model=Model(features=1, layers=(layer, second)), data=Data(microbatches=(1,)), **changes)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, *around)))


def in_columns(dp: int) -> Layout:
    """Two tensor-parallel ranks for each of `dp`: a weight is cut by columns, and its rows once more."""
    mesh = Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=2)))
    return Layout(mesh=mesh, parallelisms=(TensorParallel(plan=(LayerPlan(split=Split.COLUMN),)), FSDP2()))


def over_columns(rows: int, *, tp: int, seed: int = 0) -> Scenario:
    """Two ranks that cut the rows of a weight for each of `tp` that have cut it by columns."""
    return over_tp(FSDP2(), Layer(width=rows), tp=tp, split=Split.COLUMN, loss=Loss.LINEAR_SUM, seed=seed)


ASKING = 4
"""A seed by which `full_tensor()` is read."""
ONE_RANK = Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(DDP(),))


def into_columns(rows: int, *, first: Layout = ONE_RANK) -> Scenario:
    """A checkpoint of one rank or others, loaded by six that cut a weight by columns and its rows once more."""
    training = Training(
        model=Model(features=1, layers=(Layer(width=rows),)), data=Data(microbatches=(12,)), loss=Loss.LINEAR_SUM, steps=2
    )
    return Scenario(training=training, layout=in_columns(3), resume=Resume(layout=first, steps=1))


def going_on(parallelism: Parallelism, *layers: Layer) -> Scenario:
    """A checkpoint of one rank, loaded by another parallelism on one."""
    return replace(scenario(parallelism, *layers, sizes=(1,), steps=2), resume=Resume(layout=ONE_RANK, steps=1))


NORMED = Layer(width=2, norm=Norm.LAYER)
SKIPPED = replace(ONE_WEIGHT, auxiliary=AuxiliaryLinear.NEVER)
TIED = (Layer(width=2, bias=False), Layer(width=2, bias=False, shares=0))
UNTIED = (Layer(width=2, bias=False), Layer(width=2, bias=False))
AROUND = (Layer(width=2, bias=False), Layer(width=2, bias=False, norm=Norm.LAYER, shares=2))
FEATURES = TensorParallel(plan=(LayerPlan(split=Split.COLUMN, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROW)))
CROSSED = (Layer(width=3), Layer(width=8))
"""Sharded by rows on two ranks, the gradient of the second weight comes back as a transposed product."""
FUSED = {"optimizer": AdamW(implementation=Implementation.FUSED), "loss": Loss.LINEAR_SUM}
FALLING = {"clipping": INF, "precision": FLOAT32, "steps": 5}
VIEWED = replace(ONE_WEIGHT, shape_op=ShapeOp.VIEW)
ZB = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE
DUAL = Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4)
FOUR_ROWS = Data(microbatches=(4,))
FLAT = Layer(width=3, shape_op=ShapeOp.FLATTEN)
SEVERAL = {"features": 2, "data": Data(microbatches=(6,)), "loss": Loss.LINEAR_SUM}
ONE_OUTPUT = Layer(width=1, activation=Activation.GELU)
SPLIT = Layer(width=4, shape_op=ShapeOp.VIEW)
TURNED = {"data": Data(microbatches=(4,), batch_dim=1)}

THAWED = Layer(width=1, frozen=True)
"""Cut over two ranks the second has nothing of it, of which data parallelism makes something trainable."""
UNFLATTENED = FSDP1(use_orig_params=False)
COLUMNS = {"features": 4, "tp": 2, "split": Split.COLUMN}
LIKE = (Layer(width=4), Layer(width=3))
DIFFERENT = (Layer(width=4), Layer(width=2))
BESIDE = Layer(width=4, auxiliary=AuxiliaryLinear.EVEN_STEPS)
ALTERNATING = (Layer(width=2, auxiliary=AuxiliaryLinear.EVEN_STEPS, frozen=True), Layer(width=2))
THRICE = {"features": 4, "data": Data(microbatches=(4,)), "loss": Loss.LINEAR_SUM, "steps": 3}
"""In the third step the first step's graph is compiled once more, for any step."""

UNEVEN = {"sizes": (3,), "loss": Loss.MSE_MEAN, "data": Data(microbatches=(3,), batch_dim=1)}
EVEN = UNEVEN | {"loss": Loss.LINEAR_MEAN}
NO_OUTPUT = Layer(width=4)
"""Cut over three ranks, two of them hold all."""

DIVIDED = FSDP2(gradient_divide_factor=4.0, sum_reductions=True)

ROW_UNDER_MUON = {"split": Split.ROW, "second": ONE_WEIGHT, "optimizer": Muon()}
RESHARDED = FSDP2(reshard_to=2, shard_last_dim=True)

TIED_UNITS = FSDP2(wrapping=Wrapping.PER_LAYER)

ALIKE = (Layer(width=3), Layer(width=3))
TURNED_ROWS = {"features": 3, "data": Data(microbatches=(2,), batch_dim=1)}
"""The first layer gets a transposed tensor, and the second one by rows."""
REPEATED = Layer(width=2, shape_op=ShapeOp.REPEAT)
TWO_SIZES = {"features": 2, "data": Data(microbatches=(4, 8)), "loss": Loss.LINEAR_SUM}

UNITS_OF_REPLICAS = Replicate(implementation=Replicator.FSDP, wrapping=Wrapping.PER_LAYER)

SHOWN = {
    "fsdp2_weight_in_two_units": (
        scenario(TIED_UNITS, *TIED, features=2),
        [
            scenario(FSDP2(), *TIED, features=2),
            scenario(TIED_UNITS, *(replace(layer, shares=None) for layer in TIED), features=2),
        ],
    ),
    "muon_of_no_columns": (
        first_cut(FROZEN, DDP(), **ROW_UNDER_MUON),
        [first_cut(FROZEN, **ROW_UNDER_MUON)],
    ),
    "fsdp2_reshards_last_dim": (
        scenario(RESHARDED, sizes=(4,), features=4),
        [
            scenario(replace(RESHARDED, shard_last_dim=False), sizes=(4,), features=4),
            scenario(FSDP2(shard_last_dim=True), sizes=(4,), features=4),
        ],
    ),
    "fsdp2_one_shard_divided_twice": (
        scenario(DIVIDED, sizes=(1,)),
        [
            scenario(DIVIDED),
            scenario(DIVIDED, sizes=(1, 2)),
            scenario(replace(DIVIDED, gradient_divide_factor=1.0), sizes=(1,)),
            scenario(replace(DIVIDED, sum_reductions=False), sizes=(1,), precision=FLOAT32),
        ],
    ),
    "dtensor_mean_uneven": (
        scenario(FULLY_SHARD, Layer(width=5), **EVEN),
        [
            scenario(FULLY_SHARD, Layer(width=3), **EVEN),
            scenario(DDP(), Layer(width=5), **EVEN),
        ],
    ),
    "dtensor_mean_of_nothing": (
        scenario(FULLY_SHARD, NO_OUTPUT, **EVEN),
        [scenario(DDP(), NO_OUTPUT, **EVEN)],
    ),
    "dtensor_mse_loss_mean_uneven": (
        scenario(FULLY_SHARD, Layer(width=5), **UNEVEN),
        [scenario(FULLY_SHARD, Layer(width=5), **EVEN), scenario(DDP(), Layer(width=5), **UNEVEN)],
    ),
    "dtensor_mse_loss_mean_of_nothing": (
        scenario(FULLY_SHARD, NO_OUTPUT, **UNEVEN),
        [scenario(FULLY_SHARD, NO_OUTPUT, **EVEN), scenario(DDP(), NO_OUTPUT, **UNEVEN)],
    ),
    "dtensor_mse_loss_mean_of_nothing_traced": (
        traced(scenario(FULLY_SHARD, NO_OUTPUT, **UNEVEN)),
        [traced(scenario(FULLY_SHARD, NO_OUTPUT, **EVEN)), scenario(DDP(), NO_OUTPUT, **UNEVEN)],
    ),
    "dtensor_mse_loss_mean": (
        scenario(SPMD(), loss=Loss.MSE_MEAN),
        [scenario(SPMD()), scenario(SPMD(), sizes=(1,), loss=Loss.MSE_MEAN), scenario(SPMD(), loss=Loss.LINEAR_MEAN)],
    ),
    "dtensor_flatten_backward_strides": (
        scenario(SPMD(), FLAT, **TURNED),
        [
            scenario(SPMD(), FLAT, data=Data(microbatches=(4,))),
            scenario(SPMD(), FLAT, loss=Loss.LINEAR_SUM, **TURNED),
            scenario(SPMD(), replace(FLAT, shape_op=ShapeOp.VIEW), **TURNED),
            scenario(DDP(), FLAT, **TURNED),
        ],
    ),
    "loss_backward_strides": (
        traced(scenario(TensorParallel(), replace(FLAT, width=2), sizes=(1,), **TURNED)),
        [
            scenario(TensorParallel(), FLAT, sizes=(1,), **TURNED),
            traced(scenario(TensorParallel(), FLAT, sizes=(1,), data=Data(microbatches=(4,)))),
            traced(scenario(TensorParallel(), FLAT, sizes=(1,), loss=Loss.LINEAR_SUM, **TURNED)),
            traced(scenario(TensorParallel(), replace(FLAT, shape_op=ShapeOp.VIEW), sizes=(1,), **TURNED)),
        ],
    ),
    "dtensor_unflatten_unevenly": (
        scenario(FULLY_SHARD, SPLIT, sizes=(3,), loss=Loss.LINEAR_SUM),
        [
            scenario(SPMD(), SPLIT, sizes=(3,)),
            scenario(FULLY_SHARD, SPLIT),
            scenario(FULLY_SHARD, replace(SPLIT, shape_op=ShapeOp.SQUEEZE), sizes=(3,)),
            scenario(DDP(), SPLIT, sizes=(3,)),
        ],
    ),
    "dtensor_flatten_cut_features": (
        scenario(FULLY_SHARD, FLAT, **SEVERAL),
        [
            scenario(SPMD(), FLAT, **SEVERAL),
            scenario(FULLY_SHARD, replace(FLAT, width=1), **SEVERAL),
            scenario(FULLY_SHARD, SPLIT, **SEVERAL),
            scenario(DDP(), FLAT, **SEVERAL),
        ],
    ),
    "dtensor_view_of_one": (
        scenario(SPMD(), FLAT, sizes=(1,)),
        [
            scenario(SPMD(), FLAT, sizes=(1,), data=Data(microbatches=(2,))),
            scenario(SPMD(), FLAT),
            scenario(SPMD(), Layer(width=4), ONE_OUTPUT, sizes=(1,), loss=Loss.LINEAR_SUM),
            scenario(FULLY_SHARD, Layer(width=4), replace(ONE_OUTPUT, bias=False), sizes=(1,), loss=Loss.LINEAR_SUM),
            scenario(SPMD(), replace(FLAT, shape_op=ShapeOp.VIEW), sizes=(1,)),
            scenario(DDP(), FLAT, sizes=(1,)),
        ],
    ),
    "fsdp1_hybrid_shard_of_one": (
        scenario(HYBRID, sizes=(2, 1)),
        [scenario(HYBRID, sizes=(1, 2)), scenario(HYBRID, sizes=(2, 2)), scenario(HYBRID, sizes=(1, 1))],
    ),
    "fsdp1_inf_norm_of_nothing": (
        scenario(FSDP1(), **FALLING),
        [
            scenario(FSDP1(), Layer(width=8, bias=False), **FALLING),
            scenario(FSDP1(use_orig_params=False), **FALLING),
            scenario(FSDP1(), **FALLING | {"clipping": ClipNorm()}),
        ],
    ),
    "sequence_parallel_unfreezes": (
        scenario(ROWS, Layer(width=2), replace(NORMED, frozen=True), sizes=(1,)),
        [
            scenario(ROWS, Layer(width=2), NORMED, sizes=(1,)),
            scenario(WHOLE, Layer(width=2), replace(NORMED, frozen=True), sizes=(1,)),
        ],
    ),
    "clip_norm_epsilon_of_each_rank": (
        scenario(COLUMN, Layer(width=2), clipping=ClipNorm(max_norm=0.01)),
        [
            scenario(COLUMN, Layer(width=2), clipping=replace(INF, max_norm=0.01)),
            scenario(WHOLE, ONE_WEIGHT, ONE_WEIGHT, clipping=ClipNorm(max_norm=0.01)),
        ],
    ),
    "clip_norm_of_pending_gradients": (
        scenario(AS_PROPAGATED, Layer(width=1), loss=Loss.LINEAR_SUM, clipping=ClipNorm(max_norm=0.01)),
        [
            scenario(SPMD(), Layer(width=1), loss=Loss.LINEAR_SUM, clipping=ClipNorm(max_norm=0.01)),
            scenario(AS_PROPAGATED, Layer(width=1), loss=Loss.LINEAR_SUM),
        ],
    ),
    "ddp_swaps_parameters_of_compiled_layers": (
        compiled_layers(over_tp(DDP(), Layer(width=2), Layer(width=2), steps=2)),
        [
            over_tp(DDP(), Layer(width=2), Layer(width=2), steps=2),
            compiled_layers(over_tp(DDP(), Layer(width=2), Layer(width=2))),
            compiled_layers(over_tp(REPLICATED, Layer(width=2), Layer(width=2), steps=2)),
        ],
    ),
    "tensor_parallel_unfreezes": (
        scenario(COLUMN_FIRST, FROZEN, ONE_WEIGHT, sizes=(1,)),
        [scenario(COLUMN_FIRST, ONE_WEIGHT, ONE_WEIGHT, sizes=(1,)), scenario(WHOLE, FROZEN, ONE_WEIGHT, sizes=(1,))],
    ),
    "local_tensors_unfreeze": (
        over_tp(DDP(), FROZEN, ONE_WEIGHT),
        [
            over_tp(DDP(), ONE_WEIGHT, ONE_WEIGHT),
            over_tp(FSDP2(), FROZEN, ONE_WEIGHT),
            over_tp(REPLICATED, FROZEN, ONE_WEIGHT),
            scenario(DDP(), FROZEN, ONE_WEIGHT),
        ],
    ),
    "clip_grad_value_of_nothing": (
        scenario(FSDP1(), clipping=ClipValue()),
        [
            scenario(FSDP1(), Layer(width=8), clipping=ClipValue()),
            scenario(FSDP1(use_orig_params=False), clipping=ClipValue()),
            scenario(FSDP2(), clipping=ClipValue()),
        ],
    ),
    "inf_norm_of_empty_shard": (
        scenario(FSDP2(), clipping=INF),
        [scenario(FSDP2(), clipping=ClipNorm()), scenario(FSDP2(), Layer(width=2), clipping=INF), scenario(DDP(), clipping=INF)],
    ),
    "dtensor_rms_norm_of_features": (
        scenario(FULLY_SHARD, Layer(width=2), Layer(width=2, norm=Norm.RMS), features=2),
        [
            scenario(SPMD(), Layer(width=2), Layer(width=2, norm=Norm.RMS), features=2),
            scenario(FULLY_SHARD, Layer(width=2), NORMED, features=2),
            scenario(FULLY_SHARD, Layer(width=2, norm=Norm.RMS), features=2),
        ],
    ),
    "colwise_parallel_of_one": (
        scenario(COLUMN, Layer(width=1), sizes=(1,)),
        [
            scenario(COLUMN, Layer(width=1)),
            scenario(COLUMN, Layer(width=2), sizes=(1,)),
            scenario(COLUMN, ONE_WEIGHT, sizes=(1,)),
            scenario(TensorParallel(plan=(*COLUMN.plan, LayerPlan())), Layer(width=1, frozen=True), Layer(width=2), sizes=(1,)),
        ],
    ),
    "fused_adam_strided_gradient": (
        scenario(FULLY_SHARD, *CROSSED, features=8, **FUSED),
        [
            scenario(FULLY_SHARD, *CROSSED, features=8, optimizer=AdamW(), loss=Loss.LINEAR_SUM),
            scenario(FSDP2(), *CROSSED, features=8, **FUSED),
        ],
    ),
    "ddp_unused_parameters": (
        scenario(DDP(), SKIPPED),
        [scenario(DDP(find_unused_parameters=True), SKIPPED), scenario(DDP(), sizes=(1,)), scenario(DDP(), SKIPPED, sizes=(1,))],
    ),
    "fsdp1_norm_over_tensor_parallel": (
        over_tp(FSDP1(), Layer(width=2), tp=2, split=Split.COLUMN, clipping=ClipNorm(), precision=FLOAT32),
        [
            over_tp(FSDP1(), Layer(width=2), tp=2, clipping=ClipNorm(), precision=FLOAT32),
            over_tp(FSDP1(), Layer(width=2), split=Split.COLUMN, clipping=ClipNorm(), precision=FLOAT32),
            over_tp(FSDP2(), Layer(width=2), tp=2, split=Split.COLUMN, clipping=ClipNorm()),
        ],
    ),
    "fsdp1_flattens_nothing": (
        over_tp(FSDP1(), ONE_WEIGHT, tp=2, split=Split.COLUMN),
        [
            over_tp(FSDP1(), Layer(width=1), tp=2, split=Split.ROW),
            over_tp(FSDP1(), ONE_WEIGHT, tp=2),
            over_tp(FSDP1(), ONE_WEIGHT, Layer(width=2), tp=2, split=Split.COLUMN),
        ],
    ),
    "fsdp2_reduces_nothing": (
        over_tp(FSDP2(), ONE_WEIGHT, tp=2, split=Split.COLUMN),
        [
            over_tp(FSDP2(), Layer(width=3), tp=2, split=Split.COLUMN),
            over_tp(DDP(), ONE_WEIGHT, tp=2, split=Split.COLUMN),
            over_tp(FSDP2(), ONE_WEIGHT, tp=2),
        ],
    ),
    "fsdp2_refuses_columns_of_some_ranks": (
        over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, split=Split.ROW),
        [
            over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, split=Split.ROW, features=4),
            over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, features=2),
            over_tp(FSDP2(), Layer(width=2), tp=2, split=Split.COLUMN),
        ],
    ),
    "adafactor_norm_of_shard": (
        scenario(replace(FULLY_SHARD, redistribute_gradients=False), TWO_OUTPUTS, features=2, optimizer=Adafactor()),
        [
            scenario(FULLY_SHARD, TWO_OUTPUTS, features=2),
            scenario(SPMD(), TWO_OUTPUTS, features=2, optimizer=Adafactor()),
        ],
    ),
    "fsdp1_accumulates_one_element": (
        scenario(replace(FSDP1(), use_orig_params=False), data=Data(microbatches=(2, 2))),
        [
            scenario(FSDP1(), data=Data(microbatches=(2, 2))),
            scenario(FSDP1(use_orig_params=False), data=Data(microbatches=(4,))),
            scenario(FSDP1(use_orig_params=False, no_sync=True), data=Data(microbatches=(2, 2))),
            scenario(FSDP1(use_orig_params=False), Layer(width=1), data=Data(microbatches=(2, 2))),
            scenario(FSDP1(use_orig_params=False), sizes=(1,), data=Data(microbatches=(2, 2))),
        ],
    ),
    "fsdp1_compiles_beside_gradients": (
        compiled(scenario(FSDP1(), Layer(width=2), features=2, data=Data(microbatches=(2, 4)))),
        [
            compiled(scenario(FSDP1(), Layer(width=2), features=2, data=Data(microbatches=(4, 4)))),
            compiled(scenario(FSDP1(use_orig_params=False), Layer(width=2), features=2, data=Data(microbatches=(2, 4)))),
            scenario(FSDP1(), Layer(width=2), features=2, data=Data(microbatches=(2, 4))),
            compiled(scenario(FSDP1(), *ALTERNATING, features=2, steps=2)),
        ],
    ),
    "split_backward_of_shared_weight": (
        scenario(Pipeline(schedule=ZB), *UNTIED, *AROUND, features=2),
        [
            scenario(Pipeline(), *UNTIED, *AROUND, features=2),
            scenario(Pipeline(schedule=ZB), *UNTIED, AROUND[0], replace(AROUND[1], norm=None), features=2),
            scenario(Pipeline(schedule=ZB), *UNTIED, AROUND[0], replace(AROUND[1], frozen=True), features=2),
            scenario(Pipeline(schedule=ZB), UNTIED[0], AROUND[0], features=2),
        ],
    ),
    "compiled_flat_parameters_load": (
        compiled(going_on(UNFLATTENED, Layer(width=2))),
        [
            compiled(going_on(UNFLATTENED, Layer(width=2, bias=False))),
            compiled(going_on(FSDP1(), Layer(width=2))),
            going_on(UNFLATTENED, Layer(width=2)),
        ],
    ),
    "checkpoint_of_uneven_strided_shards": (
        into_columns(rows=7),
        [into_columns(rows=6)],
    ),
    "checkpoint_between_uneven_strided_shards": (
        into_columns(rows=13, first=in_columns(2)),
        [into_columns(rows=12, first=in_columns(2)), replace(into_columns(rows=13), resume=None)],
    ),
    "fsdp1_norm_of_doubles": (
        scenario(FSDP1(), clipping=ClipNorm()),
        [scenario(FSDP1(), clipping=ClipNorm(), precision=FLOAT32), scenario(FSDP1())],
    ),
    "tensor_parallel_unties": (
        scenario(WHOLE, *TIED, features=2),
        [scenario(WHOLE, *UNTIED, features=2), scenario(DDP(), *TIED, features=2)],
    ),
    "uneven_local_activations": (
        scenario(FEATURES, Layer(width=3), Layer(width=2), features=2),
        [scenario(FEATURES, Layer(width=4), Layer(width=2), features=2), scenario(WHOLE, Layer(width=3), Layer(width=2))],
    ),
    "ddp_static_graph_no_sync": (
        scenario(DDP(static_graph=True, no_sync=True), data=Data(microbatches=(2, 2))),
        [
            scenario(DDP(static_graph=True), data=Data(microbatches=(2, 2))),
            scenario(DDP(static_graph=True, no_sync=True)),
            scenario(DDP(no_sync=True), data=Data(microbatches=(2, 2))),
        ],
    ),
    "split_backward_behind_frozen_layers": (
        scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT),
        [
            scenario(Pipeline(schedule=PipelineSchedule.INTERLEAVED), FROZEN, ONE_WEIGHT),
            scenario(Pipeline(schedule=ZB), ONE_WEIGHT, FROZEN),
            scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT, sizes=(1,)),
        ],
    ),
    "dual_pipe_v_behind_frozen_layers": (
        scenario(DUAL, FROZEN, *(ONE_WEIGHT,) * 3, data=FOUR_ROWS),
        [
            scenario(DUAL, *(ONE_WEIGHT,) * 4, data=FOUR_ROWS),
            scenario(DUAL, FROZEN, ONE_WEIGHT, sizes=(1,), data=FOUR_ROWS),
            scenario(Pipeline(stages_per_rank=2, schedule=PipelineSchedule.LOOPED_BFS), FROZEN, *(ONE_WEIGHT,) * 3),
        ],
    ),
    "split_backward_of_view": (
        scenario(Pipeline(schedule=ZB), ONE_WEIGHT, VIEWED, ONE_WEIGHT, sizes=(3,)),
        [
            scenario(Pipeline(schedule=ZB), VIEWED, ONE_WEIGHT, VIEWED, sizes=(3,)),
            scenario(Pipeline(), ONE_WEIGHT, VIEWED, ONE_WEIGHT, sizes=(3,)),
        ],
    ),
    "dtensor_symbolic_shapes_recurse": (
        compiled(over_tp(PER_LAYER, *DIFFERENT, features=2)),
        [
            compiled(over_tp(FSDP1(), *DIFFERENT, features=2)),
            compiled(over_tp(replace(PER_LAYER, use_orig_params=False), *DIFFERENT, features=2)),
            compiled(over_tp(FSDP2(wrapping=Wrapping.PER_LAYER), *DIFFERENT, features=2)),
            over_tp(PER_LAYER, *DIFFERENT, features=2),
        ],
    ),
    "dtensor_symbolic_strides": (
        compiled(over_tp(TIED_UNITS, *ALIKE, **TURNED_ROWS)),
        [
            compiled(over_tp(FSDP2(), *ALIKE, **TURNED_ROWS)),
            compiled(over_tp(TIED_UNITS, *ALIKE, **TURNED_ROWS | {"data": Data(microbatches=(2,))})),
            compiled(over_tp(TIED_UNITS, *ALIKE[:1], **TURNED_ROWS)),
            over_tp(TIED_UNITS, *ALIKE, **TURNED_ROWS),
        ],
    ),
    "dtensor_repeat_recurses": (
        compiled(scenario(SPMD(), REPEATED, sizes=(1,), **TWO_SIZES)),
        [
            compiled(scenario(SPMD(), replace(REPEATED, shape_op=ShapeOp.VIEW), sizes=(1,), **TWO_SIZES)),
            compiled(scenario(FULLY_SHARD, REPEATED, **TWO_SIZES)),
            compiled(scenario(SPMD(), REPEATED, sizes=(1,), **TWO_SIZES | {"data": Data(microbatches=(4, 4))})),
            compiled_layers(scenario(SPMD(), REPEATED, sizes=(1,), **TWO_SIZES)),
            scenario(SPMD(), REPEATED, sizes=(1,), **TWO_SIZES),
        ],
    ),
    "dtensor_guarded_by_its_shard": (
        compiled(over_tp(UNFLATTENED, *LIKE, **COLUMNS)),
        [
            compiled(over_tp(UNFLATTENED, *DIFFERENT, **COLUMNS)),
            over_tp(UNFLATTENED, *LIKE, **COLUMNS),
            compiled(over_tp(UNFLATTENED, *LIKE, features=2, tp=2)),
        ],
    ),
    "adafactor_of_nothing": (
        first_cut(THAWED, Replicate(), optimizer=Adafactor()),
        [first_cut(THAWED, optimizer=Adafactor()), first_cut(replace(THAWED, width=2, frozen=False), Replicate())],
    ),
    "full_tensor_of_uneven_strided_shards": (
        over_columns(6, tp=2, seed=ASKING),
        [over_columns(6, tp=2), over_columns(8, tp=2, seed=ASKING), over_columns(6, tp=1, seed=ASKING)],
    ),
    "full_tensor_gathers_uneven_strided_shards": (
        over_columns(7, tp=3, seed=ASKING),
        [over_columns(7, tp=3), over_columns(12, tp=3, seed=ASKING)],
    ),
    "inductor_cache_across_ranks": (
        compiled(scenario(FULLY_SHARD, BESIDE, **THRICE), Compile.INDUCTOR),
        [compiled(scenario(FULLY_SHARD, BESIDE, **THRICE)), compiled(scenario(SPMD(), BESIDE, **THRICE), Compile.INDUCTOR)],
    ),
}
"""By issue: the smallest scenario that shows it, and some that are healthy but for one thing the same."""

ALSO_SHOWN = [
    ("dtensor_symbolic_strides", compiled(over_tp(PER_LAYER, *ALIKE, **TURNED_ROWS))),
    ("dtensor_symbolic_strides", compiled(over_tp(UNITS_OF_REPLICAS, *ALIKE, tp=2, split=Split.ROW, **TURNED_ROWS))),
    ("dtensor_repeat_recurses", with_checkpoints(compiled(scenario(AS_PROPAGATED, REPEATED, sizes=(1,), **TWO_SIZES)))),
    ("clip_grad_value_of_nothing", over_tp(FSDP1(), Layer(width=1), tp=2, split=Split.ROW, clipping=ClipValue())),
    (
        "fsdp1_accumulates_one_element",
        over_tp(UNFLATTENED, Layer(width=1), tp=2, split=Split.ROW, data=Data(microbatches=(2, 2))),
    ),
    (
        "ddp_swaps_parameters_of_compiled_layers",
        with_checkpoints(compiled_layers(over_tp(DDP(), Layer(width=2, activation=Activation.SILU), steps=2))),
    ),
    ("checkpoint_of_uneven_strided_shards", into_columns(rows=19, first=in_columns(2))),
    ("checkpoint_of_uneven_strided_shards", into_columns(rows=13, first=in_columns(3))),
    (
        "fsdp1_compiles_beside_gradients",
        compiled(scenario(FSDP1(), *ALTERNATING, features=2, steps=2, zero_grad=ZeroGrad.ZERO)),
    ),
    ("colwise_parallel_of_one", over_tp(FSDP1(), ONE_WEIGHT, Layer(width=1, frozen=True), split=Split.COLUMN)),
    ("inf_norm_of_empty_shard", over_tp(FSDP2(), Layer(width=3), tp=2, split=Split.COLUMN, clipping=INF)),
    (
        "inf_norm_of_empty_shard",
        over_tp(
            Replicate(), Layer(width=5, frozen=True), Layer(width=4), tp=4, split=Split.COLUMN, clipping=INF, precision=FLOAT32
        ),
    ),
    ("fsdp1_flattens_nothing", over_tp(PER_LAYER, ONE_WEIGHT, Layer(width=2), tp=2, split=Split.COLUMN)),
    ("fsdp1_flattens_nothing", over_tp(FSDP1(), ONE_WEIGHT, tp=2, split=Split.ROW)),
    ("ddp_unused_parameters", scenario(DDP(compression=Compression.FP16), replace(SKIPPED, norm=Norm.LAYER), sizes=(1,))),
    (
        "tensor_parallel_unties",
        scenario(TensorParallel(plan=(LayerPlan(),) * 3), FROZEN, ONE_WEIGHT, replace(ONE_WEIGHT, shares=0), sizes=(1,)),
    ),
    ("fsdp2_reduces_nothing", over_tp(FSDP2(), Layer(width=4), tp=2, split=Split.ROW)),
    ("clip_grad_value_of_nothing", scenario(Pipeline(), FROZEN, ONE_WEIGHT, clipping=ClipValue())),
    (
        "clip_grad_value_of_nothing",
        scenario(
            Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, stages_per_rank=2),
            FROZEN,
            ONE_WEIGHT,
            sizes=(1,),
            clipping=ClipValue(),
        ),
    ),
    (
        "split_backward_behind_frozen_layers",
        scenario(Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2), FROZEN, ONE_WEIGHT, sizes=(1,)),
    ),
    (
        "split_backward_behind_frozen_layers",
        scaled(scenario(Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2), FROZEN, ONE_WEIGHT, sizes=(1,))),
    ),
    ("local_tensors_unfreeze", over_tp(DDP(), replace(FROZEN, auxiliary=AuxiliaryLinear.EVEN_STEPS), ONE_WEIGHT)),
    ("local_tensors_unfreeze", over_tp(FSDP1(), FROZEN, ONE_WEIGHT)),
    ("local_tensors_unfreeze", over_tp(Replicate(), FROZEN, ONE_WEIGHT)),
    ("local_tensors_unfreeze", around_plan(over_tp(DDP(), FROZEN, replace(ONE_WEIGHT, shares=0), ONE_WEIGHT))),
    ("dtensor_view_of_one", scenario(FULLY_SHARD, Layer(width=4), ONE_OUTPUT, sizes=(1,), loss=Loss.LINEAR_SUM)),
    ("dtensor_mse_loss_mean", scenario(FULLY_SHARD, Layer(width=3), sizes=(4,), loss=Loss.MSE_MEAN, features=3)),
    ("dtensor_mse_loss_mean", scenario(SPMD(), loss=Loss.MSE_MEAN, data=Data(microbatches=(4, 2)), precision=FLOAT32)),
    ("fsdp1_hybrid_shard_of_one", scenario(replace(HYBRID, use_orig_params=False), sizes=(3, 1))),
    ("fsdp2_one_shard_divided_twice", scenario(DIVIDED, sizes=(2, 1), precision=FLOAT32)),
    ("fsdp2_one_shard_divided_twice", scenario(replace(DIVIDED, sum_reductions=False), sizes=(2, 1))),
    ("clip_grad_value_of_nothing", scenario(HYBRID, sizes=(2, 2), clipping=ClipValue())),
    ("inf_norm_of_empty_shard", scenario(FULLY_SHARD, Layer(width=4), sizes=(3,), clipping=INF)),
    ("inf_norm_of_empty_shard", scenario(COLUMN, clipping=INF)),
    ("inf_norm_of_empty_shard", scenario(TensorParallel(plan=(LayerPlan(split=Split.ROW),)), clipping=INF)),
]
"""Other ways into the same issues."""
