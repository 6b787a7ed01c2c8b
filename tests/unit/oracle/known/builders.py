"""Building blocks for scenarios that show known issues."""

from dataclasses import replace

from equivcheck import Scenario
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    ActivationSharding,
    AdamW,
    AnyLayer,
    Attention,
    AuxiliaryLinear,
    Axis,
    Checkpointing,
    ClipNorm,
    Compile,
    CrossEntropy,
    Data,
    Distribution,
    Execution,
    ExpertParallel,
    Experts,
    ExpertStorage,
    Head,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    MeshDims,
    Model,
    Muon,
    Norm,
    NormType,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Precision,
    Replicate,
    Replicator,
    Resume,
    ShapeOp,
    ShardingStrategy,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)

INF, FLOAT32 = ClipNorm(norm_type=NormType.INF), Precision.FLOAT32
FULLY_SHARD = SPMD(distribution=Distribution.FULLY_SHARD)
AS_PROPAGATED = SPMD(redistribute_gradients=False)
HYBRID = FSDP1(strategy=ShardingStrategy.HYBRID_SHARD)
ONE_WEIGHT = Layer(width=1, bias=False)
COLUMN = TensorParallel(plan=(LayerPlan(split=Split.COLWISE),))
REPLICATED = Replicate(implementation=Replicator.FSDP)
PER_LAYER = FSDP1(wrapping=Wrapping.PER_LAYER)
FROZEN = Layer(width=1, bias=False, frozen=True)
TWO_OUTPUTS = Layer(width=2)
ROWS = TensorParallel(plan=(LayerPlan(output=ActivationSharding.ROWS), LayerPlan()))
WHOLE = TensorParallel(plan=(LayerPlan(), LayerPlan()))
WHOLE_LAYER = TensorParallel(plan=(LayerPlan(),))
COLUMN_FIRST = TensorParallel(plan=(LayerPlan(split=Split.COLWISE), LayerPlan()))


def scenario(
    parallelism: Parallelism, *layers: AnyLayer, sizes: tuple[int, ...] = (2,), features: int = 1, **changes
) -> Scenario:
    """A scenario with one row per rank and a sum loss by default."""
    names = next(names for names in parallelism.axes if len(names) == len(sizes))
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    fields = {"data": Data(microbatches=(mesh.num_ranks,)), "loss": Loss.MSE_SUM} | changes
    training = Training(model=Model(features=features, layers=layers or (ONE_WEIGHT,)), **fields)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(parallelism,)))


def traced(scenario: Scenario) -> Scenario:
    """Trace each step as one graph."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(whole_step=True)))


def scaled(scenario: Scenario) -> Scenario:
    """Scale the model's outputs."""
    model = replace(scenario.training.model, scale=True)
    return replace(scenario, training=replace(scenario.training, model=model))


def compiled(scenario: Scenario, backend: Compile = Compile.AOT_EAGER) -> Scenario:
    """Compile the forward."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(compile=backend)))


def compiled_backward(scenario: Scenario) -> Scenario:
    """Compile the backward."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(compiled_autograd=True)))


def compiled_layers(scenario: Scenario) -> Scenario:
    """Compile each layer separately."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(compile=Compile.AOT_EAGER, per_layer=True)))


def with_checkpoints(scenario: Scenario, recompute: Checkpointing = Checkpointing.EVERY_LAYER) -> Scenario:
    """Recompute some layers in backward."""
    layout = scenario.layout
    return replace(scenario, layout=replace(layout, execution=replace(layout.execution, checkpointing=recompute)))


def over_tp(parallelism: Parallelism, *layers: Layer, tp: int = 1, split: Split = Split.REPLICATED, **changes) -> Scenario:
    """A scenario on two data ranks times `tp` tensor-parallel ranks. All linears have the same split."""
    alone = scenario(parallelism, *layers, **changes)
    mesh = Mesh(axes=(*alone.layout.mesh.axes, Axis(name="tp", size=tp)))
    plan = TensorParallel(plan=(LayerPlan(split=split),) * len(layers))
    return replace(alone, layout=Layout(mesh=mesh, parallelisms=(plan, parallelism)))


def around_stages(
    pipeline: Pipeline,
    *around: Parallelism,
    sizes: tuple[int, int] = (1, 2),
    layer: AnyLayer = TWO_OUTPUTS,
    num_layers: int = 2,
    **changes: object,
) -> Scenario:
    """Pipeline of identical layers inside data parallelism. `sizes` are those of the data-parallel and the pipeline axis."""
    alone = scenario(pipeline, *(layer,) * num_layers, features=2, **{"data": Data(microbatches=(8,))} | changes)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(("dp", "pp"), sizes, strict=True)))
    return replace(alone, layout=Layout(mesh=mesh, parallelisms=(pipeline, *around)))


def with_experts_on_ranks(scenario: Scenario) -> Scenario:
    """Let expert parallelism over one rank send rows to experts."""
    layout = scenario.layout
    mesh = Mesh(axes=(*layout.mesh.axes, Axis(name="ep", size=1)))
    parallelisms = (ExpertParallel(storage=ExpertStorage.PLAIN), *layout.parallelisms)
    return replace(scenario, layout=Layout(mesh=mesh, parallelisms=parallelisms))


def with_plan_in_stages(scenario: Scenario) -> Scenario:
    """Let `parallelize_module` replicate all layers of a pipeline over one rank."""
    layout = scenario.layout
    mesh = Mesh(axes=(*layout.mesh.axes, Axis(name="tp", size=1)))
    plan = TensorParallel(plan=(LayerPlan(),) * len(scenario.training.model.layers))
    return replace(scenario, layout=Layout(mesh=mesh, parallelisms=(plan, *layout.parallelisms)))


def with_columns_in_stages(scenario: Scenario) -> Scenario:
    """Let two ranks shard the output features of the first of two stages, and exchange them for rows, by `parallelize_module`."""
    mesh = Mesh(axes=(*scenario.layout.mesh.axes, Axis(name="tp", size=2)))
    plan = TensorParallel(plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS), LayerPlan()))
    return replace(scenario, layout=Layout(mesh=mesh, parallelisms=(plan, *scenario.layout.parallelisms)))


def of_positions(scenario: Scenario) -> Scenario:
    """Let rows be sequences of two positions."""
    model = replace(scenario.training.model, length=2)
    return replace(scenario, training=replace(scenario.training, model=model))


def of_experts(
    layer: Experts, *around: Parallelism, ranks: int, storage: ExpertStorage = ExpertStorage.DTENSOR, **changes: object
) -> Scenario:
    """A layer with experts over some ranks, inside data parallelism over one."""
    parallelism = ExpertParallel(storage=storage)
    alone = scenario(parallelism, layer, Layer(width=4), features=4, sizes=(ranks,), **changes)
    axes = (*(Axis(name="dp", size=1) for _ in around), *alone.layout.mesh.axes)
    return replace(alone, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism, *around)))


def planned(
    fsdp: FSDP1, *layers: AnyLayer, splits: tuple[Split, ...] = (Split.COLWISE, Split.ROWWISE), tp: int = 2, **changes
) -> Scenario:
    """One data rank and `tp` tensor-parallel ranks, with a split per layer."""
    fields = {"data": Data(microbatches=(4,)), "features": 4} | changes
    alone = over_tp(fsdp, *layers, tp=tp, sizes=(1,), **fields)
    plan = TensorParallel(plan=tuple(LayerPlan(split=split) for split in splits))
    return replace(alone, layout=replace(alone.layout, parallelisms=(plan, fsdp)))


def planned_sequences(*layers: AnyLayer, length: int = 2, rows: tuple[int, ...] = (3, 4), **changes) -> Scenario:
    """Planned layers on one rank, with sequences in the given microbatch sizes."""
    fields = {"features": 2, "data": Data(microbatches=rows)} | changes
    alone = planned(WHOLE_FLAT, *layers, splits=(Split.REPLICATED,) * len(layers), tp=1, **fields)
    model = replace(alone.training.model, length=length)
    return replace(alone, training=replace(alone.training, model=model))


def left_by_rows(scenario: Scenario) -> Scenario:
    """Leave the first layer's output sharded by rows."""
    plan, *others = scenario.layout.parallelisms
    entries = (replace(plan.plan[0], output=ActivationSharding.ROWS), *plan.plan[1:])
    return replace(scenario, layout=replace(scenario.layout, parallelisms=(replace(plan, plan=entries), *others)))


def with_head(scenario: Scenario) -> Scenario:
    """Put the layers between an embedding outside the plan and a head that is sharded by its weight's columns."""
    training, (plan, *others) = scenario.training, scenario.layout.parallelisms
    model = replace(training.model, length=2, source=Tokens(vocabulary=4), head=Head())
    parallelisms = (replace(plan, source=Split.NOT_IN_PLAN, head=Split.ROWWISE), *others)
    return replace(
        scenario,
        training=replace(training, model=model, loss=CrossEntropy()),
        layout=replace(scenario.layout, parallelisms=parallelisms),
    )


def around_plan(scenario: Scenario) -> Scenario:
    """Leave the first layer out of the tensor-parallel plan."""
    parallel, *others = scenario.layout.parallelisms
    assert isinstance(parallel, TensorParallel)
    plan = (LayerPlan(split=Split.NOT_IN_PLAN), *parallel.plan[1:])
    return replace(scenario, layout=replace(scenario.layout, parallelisms=(replace(parallel, plan=plan), *others)))


def first_cut(
    layer: Layer, *around: Parallelism, split: Split = Split.COLWISE, second: Layer = TWO_OUTPUTS, **changes: object
) -> Scenario:
    """Two tensor-parallel ranks that shard the first of two layers."""
    names = ("dp", "tp") if around else ("tp",)
    mesh = Mesh(axes=tuple(Axis(name=name, size=1 + (name == "tp")) for name in names))
    plan = TensorParallel(plan=(LayerPlan(split=split), LayerPlan(split=Split.NOT_IN_PLAN)))
    training = Training(model=Model(features=1, layers=(layer, second)), data=Data(microbatches=(1,)), **changes)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, *around)))


def added_up(*rows: int, distribution: Distribution = Distribution.FULLY_SHARD, redistribute_gradients: bool = False) -> Scenario:
    """One layer on two ranks that accumulates gradients over the given microbatch sizes. Rows are dim 1."""
    spmd = SPMD(distribution=distribution, redistribute_gradients=redistribute_gradients)
    return scenario(spmd, Layer(width=8, bias=False), features=1, data=Data(microbatches=rows, batch_dim=1), loss=Loss.MSE_SUM)


def in_columns(dp: int) -> Layout:
    """Two tensor-parallel ranks per data rank: both parallelisms shard a weight's rows."""
    mesh = Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=2)))
    return Layout(mesh=mesh, parallelisms=(TensorParallel(plan=(LayerPlan(split=Split.COLWISE),)), FSDP2()))


def over_columns(rows: int, *, tp: int, seed: int = 0) -> Scenario:
    """Two FSDP2 ranks and `tp` column-parallel ranks both shard a weight's rows."""
    return over_tp(FSDP2(), Layer(width=rows), tp=tp, split=Split.COLWISE, loss=Loss.LINEAR_SUM, seed=seed)


ASKING = 4
"""Seed that makes a check call `full_tensor()`."""
ONE_RANK = Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(DDP(),))


def into_columns(rows: int, *, first: Layout = ONE_RANK) -> Scenario:
    """A checkpoint from one rank or others, loaded by six ranks that shard a weight's rows twice."""
    training = Training(
        model=Model(features=1, layers=(Layer(width=rows),)), data=Data(microbatches=(12,)), loss=Loss.LINEAR_SUM, steps=2
    )
    return Scenario(training=training, layout=in_columns(3), resume=Resume(layout=first, steps=1))


def of_sequences(parallelism: Parallelism, layer: AnyLayer = ONE_WEIGHT, length: int | None = 2, **changes) -> Scenario:
    """A scenario on one rank with sequences as rows."""
    alone = scenario(parallelism, sizes=(1,), **changes)
    model = replace(alone.training.model, length=length, layers=(layer,))
    return replace(alone, training=replace(alone.training, model=model))


def embedded(fsdp: FSDP1, *, source: Split = Split.COLWISE, tp: int = 1) -> Scenario:
    """Token and position embeddings before a replicated layer, on one data rank."""
    alone = over_tp(fsdp, Layer(width=2), tp=tp, sizes=(1,), data=Data(microbatches=(2,)))
    model = Model(features=2, length=3, source=Tokens(vocabulary=2, learned_positions=True), layers=(Layer(width=8),))
    plan = TensorParallel(plan=(LayerPlan(),), source=source)
    return replace(alone, training=replace(alone.training, model=model), layout=replace(alone.layout, parallelisms=(plan, fsdp)))


def over_heads(
    fsdp: Parallelism,
    *layers: Attention,
    ranks: int = 1,
    tp: int = 2,
    split: Split = Split.HEADS_OR_HIDDEN,
    rows: tuple[int, ...] = (2,),
) -> Scenario:
    """Attention layers over two positions, with one split over tensor-parallel ranks and the given data ranks."""
    alone = over_tp(fsdp, *(ONE_WEIGHT,) * len(layers), tp=tp, split=split, sizes=(ranks,), data=Data(microbatches=rows))
    return replace(alone, training=replace(alone.training, model=Model(features=2, length=2, layers=layers)))


def frozen_tie(fsdp: FSDP1, *, ranks: int = 1, frozen: bool = True, tied: bool = True, steps: int = 2) -> Scenario:
    """Two steps with a trained layer between an embedding and a head, which can be frozen and tied."""
    alone = scenario(fsdp, sizes=(ranks,), steps=steps)
    source, head = Tokens(vocabulary=2, frozen=frozen), Head(tied=tied)
    model = Model(features=1, length=1, source=source, layers=(ONE_WEIGHT,), head=head)
    return replace(alone, training=replace(alone.training, model=model))


def saves_frozen(fsdp: FSDP1, *, ranks: int = 1, frozen: bool = True, head: Head | None = None) -> Scenario:
    """A checkpoint from a trained layer after an embedding, which can be frozen, loaded by the same layout."""
    alone = scenario(fsdp, sizes=(ranks,), steps=2, data=Data(microbatches=(2,)))
    model = Model(features=2, length=1, source=Tokens(vocabulary=2, frozen=frozen), layers=(Layer(width=2),), head=head)
    return replace(alone, training=replace(alone.training, model=model), resume=Resume(layout=alone.layout, steps=1))


def going_on(parallelism: Parallelism, *layers: Layer) -> Scenario:
    """A checkpoint from one rank, loaded by another parallelism on one rank."""
    return replace(scenario(parallelism, *layers, sizes=(1,), steps=2), resume=Resume(layout=ONE_RANK, steps=1))


NORMED = Layer(width=2, norm=Norm.LAYER)
SKIPPED = replace(ONE_WEIGHT, auxiliary=AuxiliaryLinear.NEVER)
TIED = (Layer(width=2, bias=False), Layer(width=2, bias=False, shares=0))
UNTIED = (Layer(width=2, bias=False), Layer(width=2, bias=False))
AROUND = (Layer(width=2, bias=False), Layer(width=2, bias=False, norm=Norm.LAYER, shares=2))
FEATURES = TensorParallel(
    plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
)
CROSSED = (Layer(width=3), Layer(width=8))
"""Sharded by rows on two ranks, the second weight's gradient comes back as a transposed product."""
FUSED = {"optimizer": AdamW(implementation=Implementation.FUSED), "loss": Loss.LINEAR_SUM}
FALLING = {"clipping": INF, "precision": FLOAT32, "steps": 5}
VIEWED = replace(ONE_WEIGHT, shape_op=ShapeOp.VIEW)
SENT = Experts(hidden=1, residual=False)
"""Experts whose output is a view if rows are sent to them."""
RETURNED = replace(SENT, dispatched=True)
ZB = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE
V_SHAPED = Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2)
DUAL = Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4)
FOUR_ROWS = Data(microbatches=(4,))
TWO_HEADS = Attention(num_heads=2, num_kv_heads=1, head_dim=2, bias=True)
FOUR_SEQUENCES = {"features": 2, "data": Data(microbatches=(4,)), "loss": Loss.LINEAR_SUM}
FLAT = Layer(width=3, shape_op=ShapeOp.FLATTEN)
SEVERAL = {"features": 2, "data": Data(microbatches=(6,)), "loss": Loss.LINEAR_SUM}
SQUARED_ROWS = {"features": 2, "data": Data(microbatches=(6,)), "loss": Loss.MSE_SUM}
ONE_OUTPUT = Layer(width=1, activation=Activation.GELU)
SPLIT = Layer(width=4, shape_op=ShapeOp.VIEW)
TURNED = {"data": Data(microbatches=(4,), batch_dim=1)}

THAWED = Layer(width=1, frozen=True)
"""Over two ranks, the second holds no element. Data parallelism makes the parameter trainable."""
UNFLATTENED = FSDP1(use_orig_params=False)
THREE = (Layer(width=4), Layer(width=4), Layer(width=4))
BY_ROWS = (Split.NOT_IN_PLAN, Split.ROWWISE, Split.ROWWISE)
BY_ROWS_ALONE = (Split.ROWWISE, Split.ROWWISE)
WHOLE_FLAT = FSDP1(strategy=ShardingStrategy.NO_SHARD, use_orig_params=False)
COLUMNS = {"features": 4, "tp": 2, "split": Split.COLWISE}
LIKE = (Layer(width=4), Layer(width=3))
DIFFERENT = (Layer(width=4), Layer(width=2))
BESIDE = Layer(width=4, auxiliary=AuxiliaryLinear.EVEN_STEPS)
ALTERNATING = (Layer(width=2, auxiliary=AuxiliaryLinear.EVEN_STEPS, frozen=True), Layer(width=2))
THRICE = {"features": 4, "data": Data(microbatches=(4,)), "loss": Loss.LINEAR_SUM, "steps": 3}
"""The third step recompiles the first step's graph for any step."""

UNEVEN = {"sizes": (3,), "loss": Loss.MSE_MEAN, "data": Data(microbatches=(3,), batch_dim=1)}
EVEN = UNEVEN | {"loss": Loss.LINEAR_MEAN}
NO_OUTPUT = Layer(width=4)
"""Over three ranks, two hold all elements."""

DIVIDED = FSDP2(gradient_divide_factor=4.0, sum_reductions=True)

ROW_UNDER_MUON = {"split": Split.ROWWISE, "second": ONE_WEIGHT, "optimizer": Muon()}
RESHARDED = FSDP2(reshard_to=2, shard_last_dim=True)

FULL_MESH = FSDP2(mesh_dims=MeshDims.SHARD, gradient_divide_factor=1.0, sum_reductions=True)

CHUNKED = FSDP2(wrapping=Wrapping.PER_LAYER, head_unit=True, loss_chunks=2, all_reduce_once=True)


def over_tokens(fsdp: FSDP2, features: int, norm: Norm | None = Norm.RMS, *microbatches: int) -> Scenario:
    """Sequences of two tokens on two replicas with two shards each."""
    model = Model(features=features, length=2, source=Tokens(vocabulary=3), layers=(Layer(width=features),), head=Head(norm=norm))
    mesh = Mesh(axes=(Axis(name="dp_replicate", size=2), Axis(name="dp_shard", size=2)))
    training = Training(model=model, data=Data(microbatches=microbatches or (4, 4)), loss=CrossEntropy())
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(fsdp,)))


TIED_UNITS = FSDP2(wrapping=Wrapping.PER_LAYER)

ALIKE = (Layer(width=3), Layer(width=3))
TURNED_ROWS = {"features": 3, "data": Data(microbatches=(2,), batch_dim=1)}
"""The first layer gets a transposed tensor, and the second one by rows."""
TURNED_TO_ONE_ROW = {"features": 2, "data": Data(microbatches=(4, 2), batch_dim=1), "loss": Loss.LINEAR_SUM}
"""A rank has two rows in the first microbatch and one in the second."""
REPEATED = Layer(width=2, shape_op=ShapeOp.REPEAT)
TWO_SIZES = {"features": 2, "data": Data(microbatches=(4, 8)), "loss": Loss.LINEAR_SUM}

UNITS_OF_REPLICAS = Replicate(implementation=Replicator.FSDP, wrapping=Wrapping.PER_LAYER)

WIDE = Attention(num_heads=2, num_kv_heads=2, head_dim=4, fused=True)
NARROW = replace(WIDE, head_dim=1)
BY_PRODUCTS = (replace(WIDE, head_dim=2, fused=False), replace(WIDE, fused=False))
MULTIPLIED = {"rows": (2, 4)}
"""The second microbatch recompiles the first layer."""
