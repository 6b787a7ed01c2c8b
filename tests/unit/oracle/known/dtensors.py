"""Scenarios with known issues in DTensor."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import (
    DDP,
    FSDP2,
    SPMD,
    Adafactor,
    AdamW,
    Checkpointing,
    ClipNorm,
    Data,
    Distribution,
    Experts,
    ExpertStorage,
    Layer,
    Loss,
    Norm,
    Replicate,
    ShapeOp,
    Split,
)
from unit.oracle.known.builders import (
    AS_PROPAGATED,
    ASKING,
    CROSSED,
    EVEN,
    FLAT,
    FOUR_SEQUENCES,
    FROZEN,
    FULLY_SHARD,
    FUSED,
    INF,
    NO_OUTPUT,
    NORMED,
    ONE_OUTPUT,
    ROW_UNDER_MUON,
    SEVERAL,
    SPLIT,
    SQUARED_ROWS,
    THAWED,
    TURNED,
    TWO_HEADS,
    TWO_OUTPUTS,
    UNEVEN,
    WHOLE_LAYER,
    added_up,
    compiled_backward,
    first_cut,
    in_columns,
    into_columns,
    of_experts,
    of_sequences,
    over_columns,
    scenario,
    with_checkpoints,
)

PAIR = Experts(hidden=2)

SHOWN = {
    "muon_of_no_columns": (
        first_cut(FROZEN, DDP(), **ROW_UNDER_MUON),
        [first_cut(FROZEN, **ROW_UNDER_MUON)],
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
    "compiled_autograd_flattens_cut_features": (
        compiled_backward(scenario(FULLY_SHARD, FLAT, **SQUARED_ROWS)),
        [
            scenario(FULLY_SHARD, FLAT, **SQUARED_ROWS),
            compiled_backward(scenario(SPMD(), FLAT, **SQUARED_ROWS)),
            compiled_backward(scenario(FULLY_SHARD, replace(FLAT, width=1), **SQUARED_ROWS)),
            compiled_backward(scenario(FULLY_SHARD, SPLIT, **SQUARED_ROWS)),
        ],
    ),
    "dtensor_product_of_cut_heads": (
        of_sequences(FULLY_SHARD, TWO_HEADS, **FOUR_SEQUENCES),
        [
            of_sequences(SPMD(), TWO_HEADS, **FOUR_SEQUENCES),
            of_sequences(FULLY_SHARD, replace(TWO_HEADS, num_heads=1), **FOUR_SEQUENCES),
            of_sequences(FULLY_SHARD, Layer(width=2), **FOUR_SEQUENCES),
            of_sequences(DDP(), TWO_HEADS, **FOUR_SEQUENCES),
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
    "clip_norm_of_pending_gradients": (
        scenario(AS_PROPAGATED, Layer(width=1), loss=Loss.LINEAR_SUM, clipping=ClipNorm(max_norm=0.01)),
        [
            scenario(SPMD(), Layer(width=1), loss=Loss.LINEAR_SUM, clipping=ClipNorm(max_norm=0.01)),
            scenario(AS_PROPAGATED, Layer(width=1), loss=Loss.LINEAR_SUM),
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
    "fused_adam_strided_gradient": (
        scenario(FULLY_SHARD, *CROSSED, features=8, **FUSED),
        [
            scenario(FULLY_SHARD, *CROSSED, features=8, optimizer=AdamW(), loss=Loss.LINEAR_SUM),
            scenario(FSDP2(), *CROSSED, features=8, **FUSED),
        ],
    ),
    "adafactor_norm_of_shard": (
        scenario(replace(FULLY_SHARD, redistribute_gradients=False), TWO_OUTPUTS, features=2, optimizer=Adafactor()),
        [
            scenario(FULLY_SHARD, TWO_OUTPUTS, features=2),
            scenario(SPMD(), TWO_OUTPUTS, features=2, optimizer=Adafactor()),
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
    "gathers_gradient_of_local_strides": (
        of_experts(PAIR, ranks=3),
        [
            of_experts(PAIR, ranks=2),
            of_experts(replace(PAIR, frozen=True), ranks=3),
            of_experts(PAIR, DDP(), ranks=3),
            of_experts(PAIR, ranks=3, storage=ExpertStorage.PLAIN),
        ],
    ),
    "selective_checkpoint_counts_fsdp2": (
        with_checkpoints(of_experts(PAIR, FSDP2(), ranks=1), Checkpointing.SELECTIVE),
        [
            with_checkpoints(of_experts(PAIR, FSDP2(), ranks=1)),
            with_checkpoints(of_experts(PAIR, DDP(), ranks=1), Checkpointing.SELECTIVE),
            with_checkpoints(of_experts(PAIR, FSDP2(), ranks=1, storage=ExpertStorage.PLAIN), Checkpointing.SELECTIVE),
            with_checkpoints(scenario(FSDP2(), TWO_OUTPUTS, sizes=(1,)), Checkpointing.SELECTIVE),
        ],
    ),
    "fully_shard_shape_of_nothing": (
        first_cut(FROZEN, FSDP2(), split=Split.ROWWISE, seed=ASKING),
        [
            first_cut(FROZEN, FSDP2(), split=Split.ROWWISE),
            first_cut(FROZEN, FSDP2(ignore_frozen=True), split=Split.ROWWISE, seed=ASKING),
            first_cut(FROZEN, FSDP2(), seed=ASKING),
        ],
    ),
    "compiled_autograd_recomputes_sequences": (
        with_checkpoints(compiled_backward(of_sequences(WHOLE_LAYER))),
        [
            with_checkpoints(of_sequences(WHOLE_LAYER)),
            compiled_backward(of_sequences(WHOLE_LAYER)),
            with_checkpoints(compiled_backward(of_sequences(WHOLE_LAYER, length=None))),
        ],
    ),
    "shards_not_added_to_pending": (
        added_up(60, 4),
        [added_up(60, 60), added_up(60, 4, redistribute_gradients=True), added_up(60, 4, distribution=Distribution.REPLICATE)],
    ),
}
