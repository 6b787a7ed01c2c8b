"""Scenarios with known issues in traced or compiled code."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    Attention,
    AuxiliaryLinear,
    Checkpointing,
    Compile,
    Data,
    Layer,
    Loss,
    ShapeOp,
    Split,
    TensorParallel,
    Wrapping,
)
from unit.oracle.known.builders import (
    ALIKE,
    ALTERNATING,
    BESIDE,
    BY_PRODUCTS,
    BY_ROWS,
    BY_ROWS_ALONE,
    COLUMNS,
    DIFFERENT,
    EVEN,
    FLAT,
    FULLY_SHARD,
    LIKE,
    MULTIPLIED,
    NARROW,
    NO_OUTPUT,
    PER_LAYER,
    REPEATED,
    REPLICATED,
    THREE,
    THRICE,
    TIED_UNITS,
    TURNED,
    TURNED_ROWS,
    TURNED_TO_ONE_ROW,
    TWO_OUTPUTS,
    TWO_SIZES,
    UNEVEN,
    UNFLATTENED,
    UNITS_OF_REPLICAS,
    WHOLE_FLAT,
    WHOLE_LAYER,
    WIDE,
    around_plan,
    compiled,
    compiled_layers,
    embedded,
    going_on,
    of_sequences,
    over_heads,
    over_tp,
    planned,
    planned_sequences,
    scenario,
    traced,
    with_checkpoints,
)

UNBIASED = Layer(width=4, bias=False)
ACTIVATED = (THREE[0], replace(THREE[1], activation=Activation.TANH), THREE[2])
WITH_A_SECOND = (THREE[0], replace(THREE[1], auxiliary=AuxiliaryLinear.EVEN_STEPS), THREE[2])
SECOND_BY_COLUMNS = (Split.NOT_IN_PLAN, Split.COLWISE, Split.ROWWISE)
LAST_OUTSIDE = (Split.NOT_IN_PLAN, Split.ROWWISE, Split.NOT_IN_PLAN)

SHOWN = {
    "dtensor_mse_loss_mean_of_nothing_traced": (
        traced(scenario(FULLY_SHARD, NO_OUTPUT, **UNEVEN)),
        [traced(scenario(FULLY_SHARD, NO_OUTPUT, **EVEN)), scenario(DDP(), NO_OUTPUT, **UNEVEN)],
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
    "ddp_swaps_parameters_of_compiled_layers": (
        compiled_layers(over_tp(DDP(), Layer(width=2), Layer(width=2), steps=2)),
        [
            over_tp(DDP(), Layer(width=2), Layer(width=2), steps=2),
            compiled_layers(over_tp(DDP(), Layer(width=2), Layer(width=2))),
            compiled_layers(over_tp(REPLICATED, Layer(width=2), Layer(width=2), steps=2)),
        ],
    ),
    "compiled_embedding_under_fsdp1": (
        compiled(embedded(WHOLE_FLAT)),
        [embedded(WHOLE_FLAT), compiled(embedded(WHOLE_FLAT, source=Split.NOT_IN_PLAN))],
    ),
    "compiled_embedding_by_tokens": (
        compiled(embedded(WHOLE_FLAT, source=Split.ROWWISE, tp=2)),
        [embedded(WHOLE_FLAT, source=Split.ROWWISE, tp=2), compiled(embedded(WHOLE_FLAT, source=Split.NOT_IN_PLAN, tp=2))],
    ),
    "compiled_checkpoint_saves_mesh": (
        with_checkpoints(compiled(of_sequences(WHOLE_LAYER, Attention(fused=True)))),
        [
            with_checkpoints(of_sequences(WHOLE_LAYER, Attention(fused=True))),
            compiled(of_sequences(WHOLE_LAYER, Attention(fused=True))),
            with_checkpoints(compiled(of_sequences(WHOLE_LAYER, Attention()))),
        ],
    ),
    "compiled_hook_after_pending_checkpoint": (
        with_checkpoints(compiled(planned(WHOLE_FLAT, *THREE, splits=BY_ROWS)), Checkpointing.ODD_LAYERS),
        [
            compiled(planned(WHOLE_FLAT, *THREE, splits=BY_ROWS)),
            with_checkpoints(planned(WHOLE_FLAT, *THREE, splits=BY_ROWS), Checkpointing.ODD_LAYERS),
            with_checkpoints(compiled(planned(WHOLE_FLAT, *THREE, splits=BY_ROWS)), Checkpointing.EVERY_LAYER),
            with_checkpoints(compiled(planned(WHOLE_FLAT, *THREE, splits=BY_ROWS, tp=1)), Checkpointing.ODD_LAYERS),
            with_checkpoints(compiled(planned(WHOLE_FLAT, *THREE, splits=SECOND_BY_COLUMNS)), Checkpointing.ODD_LAYERS),
            with_checkpoints(compiled(planned(WHOLE_FLAT, *THREE, splits=LAST_OUTSIDE)), Checkpointing.ODD_LAYERS),
            with_checkpoints(compiled(planned(WHOLE_FLAT, *ACTIVATED, splits=BY_ROWS)), Checkpointing.ODD_LAYERS),
            with_checkpoints(compiled(planned(WHOLE_FLAT, *WITH_A_SECOND, splits=BY_ROWS)), Checkpointing.ODD_LAYERS),
        ],
    ),
    "compiled_hook_of_viewed_sequences": (
        compiled(planned_sequences(Layer(width=8))),
        [
            planned_sequences(Layer(width=8)),
            compiled_layers(planned_sequences(Layer(width=8))),
            compiled(planned_sequences(Layer(width=8, bias=False))),
            compiled(planned_sequences(Layer(width=8), rows=(4, 4))),
            compiled(planned_sequences(Layer(width=8), rows=(4, 2))),
            compiled(planned_sequences(Layer(width=8), length=1)),
            compiled(planned_sequences(Layer(width=8), length=8)),
            with_checkpoints(compiled(planned_sequences(Layer(width=8)))),
            compiled(around_plan(planned_sequences(Layer(width=8)))),
        ],
    ),
    "compiled_hook_of_viewed_features": (
        compiled(planned_sequences(UNBIASED, Layer(width=2), UNBIASED, rows=(4,))),
        [
            planned_sequences(UNBIASED, Layer(width=2), UNBIASED, rows=(4,)),
            compiled_layers(planned_sequences(UNBIASED, Layer(width=2), UNBIASED, rows=(4,))),
            compiled(planned_sequences(UNBIASED, Layer(width=2, bias=False), UNBIASED, rows=(4,))),
            compiled(planned_sequences(Layer(width=4), Layer(width=2), UNBIASED, rows=(4,), length=3)),
            compiled(planned_sequences(Layer(width=2), UNBIASED, rows=(4,))),
            compiled(planned_sequences(UNBIASED, Layer(width=2), rows=(4,))),
            with_checkpoints(
                compiled(planned_sequences(UNBIASED, Layer(width=2), UNBIASED, rows=(4,))), Checkpointing.ODD_LAYERS
            ),
        ],
    ),
    "dtensor_symbolic_size_becomes_number": (
        compiled(planned(WHOLE_FLAT, Layer(width=2), Layer(width=2))),
        [
            planned(WHOLE_FLAT, Layer(width=2), Layer(width=2)),
            compiled_layers(planned(WHOLE_FLAT, Layer(width=2), Layer(width=2))),
            compiled(planned(WHOLE_FLAT, Layer(width=4), Layer(width=2))),
            compiled(planned(WHOLE_FLAT, Layer(width=2), Layer(width=2), features=2)),
            compiled(planned(WHOLE_FLAT, Layer(width=2), Layer(width=3), tp=3, data=Data(microbatches=(6,)))),
            compiled(planned(WHOLE_FLAT, Layer(width=4), Layer(width=2), splits=BY_ROWS_ALONE, features=2)),
            compiled(planned(WHOLE_FLAT, Layer(width=2), Layer(width=2), splits=(Split.NOT_IN_PLAN, Split.ROWWISE))),
            with_checkpoints(compiled(planned(WHOLE_FLAT, Layer(width=2), Layer(width=2))), Checkpointing.ODD_LAYERS),
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
    "compiled_flat_parameters_load": (
        compiled(going_on(UNFLATTENED, Layer(width=2))),
        [
            compiled(going_on(UNFLATTENED, Layer(width=2, bias=False))),
            compiled(going_on(FSDP1(), Layer(width=2))),
            going_on(UNFLATTENED, Layer(width=2)),
        ],
    ),
    "compiled_flat_shared_weight_load": (
        compiled(going_on(UNFLATTENED, Layer(width=1, bias=False), Layer(width=1, bias=False, shares=0))),
        [
            compiled(going_on(UNFLATTENED, Layer(width=1, bias=False))),
            compiled(going_on(FSDP1(), Layer(width=1, bias=False), Layer(width=1, bias=False, shares=0))),
            going_on(UNFLATTENED, Layer(width=1, bias=False), Layer(width=1, bias=False, shares=0)),
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
    "dtensor_symbolic_product": (
        compiled(over_heads(TIED_UNITS, WIDE, NARROW, **MULTIPLIED)),
        [
            compiled(over_heads(TIED_UNITS, WIDE, NARROW)),
            compiled(over_heads(TIED_UNITS, WIDE, WIDE, **MULTIPLIED)),
            compiled(over_heads(TIED_UNITS, WIDE, NARROW, tp=1, **MULTIPLIED)),
            compiled(over_heads(TIED_UNITS, WIDE, NARROW, split=Split.REPLICATED, **MULTIPLIED)),
            compiled(over_heads(FSDP2(), WIDE, NARROW, **MULTIPLIED)),
            compiled(over_heads(UNITS_OF_REPLICAS, WIDE, NARROW, **MULTIPLIED)),
            compiled(over_heads(TIED_UNITS, replace(WIDE, frozen=True), NARROW, **MULTIPLIED)),
            compiled(over_heads(TIED_UNITS, replace(WIDE, fused=False), NARROW, **MULTIPLIED)),
            compiled_layers(over_heads(TIED_UNITS, WIDE, NARROW, **MULTIPLIED)),
            over_heads(TIED_UNITS, WIDE, NARROW, **MULTIPLIED),
        ],
    ),
    "dtensor_symbolic_strides_of_heads": (
        compiled(over_heads(TIED_UNITS, *BY_PRODUCTS, tp=1)),
        [
            compiled(over_heads(TIED_UNITS, *BY_PRODUCTS[:1] * 2, tp=1)),
            compiled(over_heads(TIED_UNITS, BY_PRODUCTS[0], NARROW, tp=1)),
            compiled(over_heads(TIED_UNITS, BY_PRODUCTS[0], WIDE, tp=1)),
            compiled(over_heads(TIED_UNITS, BY_PRODUCTS[0], replace(BY_PRODUCTS[1], rotary=True), tp=1)),
            compiled(over_heads(FSDP2(), *BY_PRODUCTS, tp=1)),
            compiled(over_heads(UNITS_OF_REPLICAS, *BY_PRODUCTS, tp=1)),
            compiled(over_heads(replace(PER_LAYER, use_orig_params=False), *BY_PRODUCTS, ranks=2, tp=1)),
            compiled(over_heads(PER_LAYER, *BY_PRODUCTS, ranks=2, tp=1)),
            over_heads(TIED_UNITS, *BY_PRODUCTS, tp=1),
        ],
    ),
    "dtensor_symbolic_strides_of_one_row": (
        compiled(scenario(FULLY_SHARD, TWO_OUTPUTS, **TURNED_TO_ONE_ROW)),
        [
            compiled(scenario(SPMD(), TWO_OUTPUTS, **TURNED_TO_ONE_ROW)),
            compiled(scenario(FULLY_SHARD, TWO_OUTPUTS, **TURNED_TO_ONE_ROW | {"data": Data(microbatches=(6, 4), batch_dim=1)})),
            compiled(scenario(FULLY_SHARD, TWO_OUTPUTS, **TURNED_TO_ONE_ROW | {"data": Data(microbatches=(4, 2))})),
            scenario(FULLY_SHARD, TWO_OUTPUTS, **TURNED_TO_ONE_ROW),
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
    "inductor_cache_across_ranks": (
        compiled(scenario(FULLY_SHARD, BESIDE, **THRICE), Compile.INDUCTOR),
        [compiled(scenario(FULLY_SHARD, BESIDE, **THRICE)), compiled(scenario(SPMD(), BESIDE, **THRICE), Compile.INDUCTOR)],
    ),
}
