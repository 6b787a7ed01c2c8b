"""Further scenarios that show known issues."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.plan.rules import UNFREEZES
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    Adafactor,
    Attention,
    AuxiliaryLinear,
    Axis,
    Checkpointing,
    ClipValue,
    Compression,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    Pipeline,
    PipelineSchedule,
    Replicate,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
    ZeroGrad,
)
from equivcheck.system.torch_version import is_torch_in
from unit.oracle.known.builders import (
    ALIKE,
    ALTERNATING,
    AS_PROPAGATED,
    ASKING,
    BY_PRODUCTS,
    BY_ROWS,
    BY_ROWS_ALONE,
    COLUMN,
    DIVIDED,
    FLOAT32,
    FROZEN,
    FULL_MESH,
    FULLY_SHARD,
    HYBRID,
    INF,
    NARROW,
    ONE_OUTPUT,
    ONE_WEIGHT,
    PER_LAYER,
    REPEATED,
    REPLICATED,
    RETURNED,
    SENT,
    SKIPPED,
    THREE,
    TIED_UNITS,
    TURNED,
    TURNED_ROWS,
    TWO_SIZES,
    UNFLATTENED,
    UNITS_OF_REPLICAS,
    UNTIED,
    V_SHAPED,
    WHOLE_FLAT,
    WHOLE_LAYER,
    WIDE,
    ZB,
    around_plan,
    around_stages,
    compiled,
    compiled_layers,
    first_cut,
    in_columns,
    into_columns,
    left_by_rows,
    of_sequences,
    over_heads,
    over_tp,
    planned,
    planned_sequences,
    scaled,
    scenario,
    traced,
    with_checkpoints,
    with_experts_on_ranks,
    with_head,
    with_plan_in_stages,
)

RESHARDED_ZERO_BUBBLE = around_stages(
    Pipeline(schedule=ZB, stages_per_rank=3, num_chunks=4),
    FSDP2(),
    layer=Layer(width=2, activation=Activation.TANH),
    num_layers=6,
)
LAST_STAGE_FROZEN = Scenario(
    training=Training(
        model=Model(
            features=2,
            length=1,
            source=Tokens(vocabulary=3, frozen=True),
            layers=(Layer(width=2), Layer(width=2, frozen=True)),
            head=Head(tied=True),
        ),
        data=Data(microbatches=(2,)),
        loss=CrossEntropy(),
        clipping=ClipValue(),
    ),
    layout=Layout(mesh=Mesh(axes=(Axis(name="pp", size=2),)), parallelisms=(Pipeline(),)),
)
"""The last stage has a frozen layer, and a head tied to the frozen embedding."""

ONE_BIAS = (Layer(width=2), Layer(width=2, frozen=True), Layer(width=2, shares=1))
ONE_COLUMN = (LayerPlan(), LayerPlan(), LayerPlan(split=Split.COLWISE))
"""The only sharded trained parameter is a bias."""
UNTIED_OR_OF_SHARD = "tensor_parallel_unties" if is_torch_in(UNFREEZES) else "adafactor_norm_of_shard"
"""Tensor parallelism unfreezes a weight and leaves a copy of it, which is trained."""
FLAT_UNITS = replace(WHOLE_FLAT, wrapping=Wrapping.PER_LAYER)
NARROWED = (Layer(width=4), Layer(width=2))

PRODUCT_OR_STRIDES = "dtensor_symbolic_product" if is_torch_in("<2.14") else "dtensor_symbolic_strides_of_heads"
"""First error that sharded heads run into."""
GROUPED = Attention(num_heads=4, num_kv_heads=2, head_dim=4)
TWICE_IN_THIRD = Pipeline(schedule=ZB, boundaries=(1, 2))
"""The second stage owns a weight that two layers of the third stage share."""
OF_SECOND = replace(UNTIED[1], shares=1)
OF_THIRD = replace(UNTIED[1], shares=2)
SECOND_FROZEN = (UNTIED[0], replace(UNTIED[1], frozen=True))
BIAS_ONLY = Layer(width=2, shares=1)
"""Layer with a frozen weight of another layer and a trained bias."""

ALSO_SHOWN = [
    ("loss_backward_strides", traced(of_sequences(WHOLE_LAYER, **TURNED))),
    ("dtensor_symbolic_strides", compiled(over_tp(PER_LAYER, *ALIKE, **TURNED_ROWS))),
    ("dtensor_symbolic_strides", compiled(over_tp(UNITS_OF_REPLICAS, *ALIKE, tp=2, split=Split.ROWWISE, **TURNED_ROWS))),
    ("dtensor_symbolic_product", compiled(over_heads(PER_LAYER, NARROW, WIDE, ranks=2))),
    (PRODUCT_OR_STRIDES, compiled(over_heads(TIED_UNITS, BY_PRODUCTS[0], NARROW, GROUPED))),
    (PRODUCT_OR_STRIDES, compiled(over_heads(TIED_UNITS, BY_PRODUCTS[0], WIDE))),
    ("dtensor_symbolic_strides_of_heads", compiled(over_heads(TIED_UNITS, NARROW, BY_PRODUCTS[0], split=Split.REPLICATED))),
    ("dtensor_repeat_recurses", with_checkpoints(compiled(scenario(AS_PROPAGATED, REPEATED, sizes=(1,), **TWO_SIZES)))),
    ("clip_grad_value_of_nothing", over_tp(FSDP1(), Layer(width=1), tp=2, split=Split.ROWWISE, clipping=ClipValue())),
    (
        "fsdp1_accumulates_one_element",
        over_tp(UNFLATTENED, Layer(width=1), tp=2, split=Split.ROWWISE, data=Data(microbatches=(2, 2))),
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
    (
        "compiled_hook_after_pending_checkpoint",
        with_checkpoints(compiled_layers(planned(FLAT_UNITS, *THREE, splits=BY_ROWS)), Checkpointing.ODD_LAYERS),
    ),
    (
        "compiled_hook_after_pending_checkpoint",
        with_head(with_checkpoints(compiled(planned(WHOLE_FLAT, Layer(width=2), splits=(Split.ROWWISE,), features=2)))),
    ),
    (
        "dtensor_symbolic_size_becomes_number",
        with_head(compiled(planned(WHOLE_FLAT, GatedMLP(hidden=8), splits=(Split.HEADS_OR_HIDDEN,), features=2))),
    ),
    (
        "dtensor_symbolic_size_becomes_number",
        compiled(planned(FLAT_UNITS, *NARROWED, splits=BY_ROWS_ALONE, features=2, data=Data(microbatches=(2, 4)))),
    ),
    (
        "compiled_hook_of_viewed_features",
        compiled(planned_sequences(Layer(width=4, bias=False), Layer(width=2), rows=(4, 4))),
    ),
    (
        "compiled_hook_of_viewed_features",
        compiled(planned_sequences(GatedMLP(hidden=4, bias=True), GatedMLP(hidden=3), rows=(4,), steps=2)),
    ),
    ("dtensor_symbolic_size_becomes_number", compiled(left_by_rows(planned(WHOLE_FLAT, Layer(width=2), Layer(width=2))))),
    ("colwise_parallel_of_one", over_tp(FSDP1(), ONE_WEIGHT, Layer(width=1, frozen=True), split=Split.COLWISE)),
    (
        "colwise_parallel_of_one",
        of_sequences(TensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),)), GatedMLP(hidden=1, bias=True), **TURNED),
    ),
    (
        UNTIED_OR_OF_SHARD,
        scenario(TensorParallel(plan=ONE_COLUMN), *ONE_BIAS, optimizer=Adafactor()),
    ),
    ("inf_norm_of_empty_shard", over_tp(FSDP2(), Layer(width=3), tp=2, split=Split.COLWISE, clipping=INF)),
    (
        "inf_norm_of_empty_shard",
        over_tp(
            Replicate(), Layer(width=5, frozen=True), Layer(width=4), tp=4, split=Split.COLWISE, clipping=INF, precision=FLOAT32
        ),
    ),
    ("fsdp1_flattens_nothing", over_tp(PER_LAYER, ONE_WEIGHT, Layer(width=2), tp=2, split=Split.COLWISE)),
    ("fsdp1_flattens_nothing", over_tp(FSDP1(), ONE_WEIGHT, tp=2, split=Split.ROWWISE)),
    ("ddp_broadcasts_one_strided_tensor", over_tp(Replicate(), ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=3, sizes=(1,))),
    ("ddp_unused_parameters", scenario(DDP(compression=Compression.FP16), replace(SKIPPED, norm=Norm.LAYER), sizes=(1,))),
    (
        "tensor_parallel_unties",
        scenario(TensorParallel(plan=(LayerPlan(),) * 3), FROZEN, ONE_WEIGHT, replace(ONE_WEIGHT, shares=0), sizes=(1,)),
    ),
    ("fsdp2_reduces_nothing", over_tp(FSDP2(), Layer(width=4), tp=2, split=Split.ROWWISE)),
    ("fully_shard_shape_of_nothing", first_cut(FROZEN, REPLICATED, split=Split.ROWWISE, seed=ASKING)),
    ("fsdp2_reduces_nothing", over_tp(REPLICATED, ONE_WEIGHT, tp=2, split=Split.COLWISE)),
    ("clip_grad_value_of_nothing", scenario(Pipeline(), FROZEN, ONE_WEIGHT, clipping=ClipValue())),
    ("clip_grad_value_of_nothing", LAST_STAGE_FROZEN),
    ("split_backward_around_reshard", with_checkpoints(RESHARDED_ZERO_BUBBLE)),
    ("split_backward_around_reshard", with_checkpoints(with_plan_in_stages(RESHARDED_ZERO_BUBBLE))),
    (
        "clip_grad_value_of_nothing",
        around_stages(
            Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, num_chunks=2),
            FSDP2(),
            sizes=(2, 2),
            clipping=ClipValue(),
        ),
    ),
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
    (
        "split_backward_behind_frozen_layers",
        scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT, replace(ONE_WEIGHT, shares=1), sizes=(3,)),
    ),
    (
        "split_backward_behind_frozen_layers",
        scenario(V_SHAPED, FROZEN, ONE_WEIGHT, replace(ONE_WEIGHT, shares=1), ONE_WEIGHT),
    ),
    (
        "split_backward_of_shared_weight",
        scenario(TWICE_IN_THIRD, *UNTIED, OF_SECOND, replace(OF_SECOND, norm=Norm.LAYER), sizes=(3,), features=2),
    ),
    (
        "split_backward_of_shared_weight",
        scenario(Pipeline(schedule=ZB, boundaries=(1,)), *UNTIED, replace(OF_SECOND, shares=0), OF_SECOND, features=2),
    ),
    (
        "split_backward_of_shared_weight",
        scenario(Pipeline(schedule=ZB, boundaries=(2,)), *SECOND_FROZEN, UNTIED[0], BIAS_ONLY, OF_THIRD, features=2),
    ),
    ("split_backward_adds_shared_weight", scenario(TWICE_IN_THIRD, *UNTIED, OF_SECOND, OF_SECOND, sizes=(3,), features=2)),
    ("split_backward_of_view", scenario(Pipeline(schedule=ZB), ONE_WEIGHT, RETURNED, ONE_WEIGHT, sizes=(3,))),
    ("split_backward_of_view", with_experts_on_ranks(scenario(V_SHAPED, ONE_WEIGHT, SENT, ONE_WEIGHT, ONE_WEIGHT))),
    ("split_backward_of_view", with_plan_in_stages(scenario(V_SHAPED, *(ONE_WEIGHT,) * 4))),
    ("local_tensors_unfreeze", over_tp(DDP(), replace(FROZEN, auxiliary=AuxiliaryLinear.EVEN_STEPS), ONE_WEIGHT)),
    ("local_tensors_unfreeze", over_tp(FSDP1(), FROZEN, ONE_WEIGHT)),
    ("local_tensors_unfreeze", over_tp(Replicate(), FROZEN, ONE_WEIGHT)),
    ("local_tensors_unfreeze", around_plan(over_tp(DDP(), FROZEN, replace(ONE_WEIGHT, shares=0), ONE_WEIGHT))),
    ("dtensor_view_of_one", scenario(FULLY_SHARD, Layer(width=4), ONE_OUTPUT, sizes=(1,), loss=Loss.LINEAR_SUM)),
    ("dtensor_mse_loss_mean", scenario(FULLY_SHARD, Layer(width=3), sizes=(4,), loss=Loss.MSE_MEAN, features=3)),
    ("dtensor_mse_loss_mean", scenario(FULL_MESH, loss=Loss.MSE_MEAN)),
    ("dtensor_mse_loss_mean", scenario(SPMD(), loss=Loss.MSE_MEAN, data=Data(microbatches=(4, 2)), precision=FLOAT32)),
    ("fsdp1_hybrid_shard_of_one", scenario(replace(HYBRID, use_orig_params=False), sizes=(3, 1))),
    ("fsdp2_one_shard_divided_twice", scenario(DIVIDED, sizes=(2, 1), precision=FLOAT32)),
    ("fsdp2_one_shard_divided_twice", scenario(replace(DIVIDED, sum_reductions=False), sizes=(2, 1))),
    ("clip_grad_value_of_nothing", scenario(HYBRID, sizes=(2, 2), clipping=ClipValue())),
    ("inf_norm_of_empty_shard", scenario(FULLY_SHARD, Layer(width=4), sizes=(3,), clipping=INF)),
    ("inf_norm_of_empty_shard", scenario(COLUMN, clipping=INF)),
    ("inf_norm_of_empty_shard", scenario(TensorParallel(plan=(LayerPlan(split=Split.ROWWISE),)), clipping=INF)),
]
"""Further pairs of issue and scenario."""
