"""Scenarios with known issues in DDP, FSDP1 and FSDP2."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import DDP, FSDP1, FSDP2, ClipNorm, Data, Head, Layer, Loss, Norm, Replicate, Split
from unit.oracle.known.builders import (
    CHUNKED,
    DIVIDED,
    FALLING,
    FLOAT32,
    FULL_MESH,
    HYBRID,
    ONE_WEIGHT,
    PER_LAYER,
    RESHARDED,
    SKIPPED,
    TIED,
    TIED_UNITS,
    frozen_tie,
    over_tokens,
    over_tp,
    saves_frozen,
    scaled,
    scenario,
)

SHOWN = {
    "fsdp2_weight_in_two_units": (
        scenario(TIED_UNITS, *TIED, features=2),
        [
            scenario(FSDP2(), *TIED, features=2),
            scenario(TIED_UNITS, *(replace(layer, shares=None) for layer in TIED), features=2),
        ],
    ),
    "fsdp2_reshards_last_dim": (
        scenario(RESHARDED, sizes=(4,), features=4),
        [
            scenario(replace(RESHARDED, shard_last_dim=False), sizes=(4,), features=4),
            scenario(FSDP2(shard_last_dim=True), sizes=(4,), features=4),
        ],
    ),
    "fsdp2_multiplies_replicated_gradients": (
        scenario(FULL_MESH, Layer(width=1), loss=Loss.LINEAR_SUM),
        [
            scenario(FULL_MESH, Layer(width=1)),
            scenario(FULL_MESH, loss=Loss.LINEAR_SUM),
            scenario(FULL_MESH, Layer(width=1), loss=Loss.LINEAR_SUM, sizes=(1,)),
            scenario(replace(FULL_MESH, mesh_dims=None), Layer(width=1), loss=Loss.LINEAR_SUM),
        ],
    ),
    "fsdp2_adds_sums_of_other_parameters": (
        over_tokens(CHUNKED, 2),
        [
            over_tokens(replace(CHUNKED, loss_chunks=1), 2),
            over_tokens(CHUNKED, 2, None),
            over_tokens(replace(CHUNKED, all_reduce_once=False), 2),
        ],
    ),
    "fsdp2_sums_of_other_sizes": (
        over_tokens(CHUNKED, 6),
        [
            over_tokens(CHUNKED, 6, None),
            over_tokens(CHUNKED, 6, Norm.RMS, 4),
            over_tokens(replace(CHUNKED, no_sync=True), 6),
            over_tokens(replace(CHUNKED, loss_chunks=1), 6),
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
    "ddp_unused_parameters": (
        scenario(DDP(), SKIPPED),
        [scenario(DDP(find_unused_parameters=True), SKIPPED), scenario(DDP(), sizes=(1,)), scenario(DDP(), SKIPPED, sizes=(1,))],
    ),
    "fsdp1_norm_over_tensor_parallel": (
        over_tp(FSDP1(), Layer(width=2), tp=2, split=Split.COLWISE, clipping=ClipNorm(), precision=FLOAT32),
        [
            over_tp(FSDP1(), Layer(width=2), tp=2, clipping=ClipNorm(), precision=FLOAT32),
            over_tp(FSDP1(), Layer(width=2), split=Split.COLWISE, clipping=ClipNorm(), precision=FLOAT32),
            over_tp(FSDP2(), Layer(width=2), tp=2, split=Split.COLWISE, clipping=ClipNorm()),
        ],
    ),
    "fsdp1_flattens_nothing": (
        over_tp(FSDP1(), ONE_WEIGHT, tp=2, split=Split.COLWISE),
        [
            over_tp(FSDP1(), Layer(width=1), tp=2, split=Split.ROWWISE),
            over_tp(FSDP1(), ONE_WEIGHT, tp=2),
            over_tp(FSDP1(), ONE_WEIGHT, Layer(width=2), tp=2, split=Split.COLWISE),
        ],
    ),
    "fsdp2_reduces_nothing": (
        over_tp(FSDP2(), ONE_WEIGHT, tp=2, split=Split.COLWISE),
        [
            over_tp(FSDP2(), Layer(width=3), tp=2, split=Split.COLWISE),
            over_tp(DDP(), ONE_WEIGHT, tp=2, split=Split.COLWISE),
            over_tp(Replicate(), ONE_WEIGHT, tp=2, split=Split.COLWISE),
            over_tp(FSDP2(), ONE_WEIGHT, tp=2),
        ],
    ),
    "fsdp2_refuses_columns_of_some_ranks": (
        over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, split=Split.ROWWISE),
        [
            over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=4),
            over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, features=2),
            over_tp(FSDP2(), Layer(width=2), tp=2, split=Split.COLWISE),
        ],
    ),
    "fully_shard_columns_of_nothing": (
        over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, split=Split.COLWISE, features=2),
        [
            over_tp(FSDP2(shard_last_dim=True), Layer(width=2, bias=False), tp=2, split=Split.COLWISE, features=2),
            over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=4),
            over_tp(FSDP2(shard_last_dim=True), ONE_WEIGHT, tp=2, features=2),
        ],
    ),
    "fsdp1_frozen_tied_weight": (
        frozen_tie(PER_LAYER),
        [
            frozen_tie(PER_LAYER, ranks=2),
            frozen_tie(PER_LAYER, frozen=False),
            frozen_tie(PER_LAYER, tied=False),
            frozen_tie(PER_LAYER, steps=1),
            frozen_tie(FSDP1()),
            frozen_tie(replace(PER_LAYER, use_orig_params=False)),
        ],
    ),
    "fsdp1_frozen_root_state_dict": (
        saves_frozen(PER_LAYER),
        [
            saves_frozen(PER_LAYER, ranks=2),
            saves_frozen(PER_LAYER, frozen=False),
            saves_frozen(PER_LAYER, head=Head()),
            saves_frozen(FSDP1()),
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
    "fsdp1_norm_of_doubles": (
        scenario(FSDP1(), clipping=ClipNorm()),
        [scenario(FSDP1(), clipping=ClipNorm(), precision=FLOAT32), scenario(FSDP1())],
    ),
    "ddp_broadcasts_one_strided_tensor": (
        over_tp(DDP(), ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=2),
        [
            over_tp(DDP(), ONE_WEIGHT, tp=2, split=Split.ROWWISE),
            over_tp(DDP(), ONE_WEIGHT, split=Split.ROWWISE, features=2),
            over_tp(DDP(), ONE_WEIGHT, tp=2, features=2),
            over_tp(DDP(), Layer(width=1), tp=2, split=Split.ROWWISE, features=2),
            over_tp(DDP(), Layer(width=2, bias=False), tp=2, split=Split.ROWWISE, features=2),
            over_tp(DDP(), ONE_WEIGHT, ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=2),
            over_tp(FSDP2(), ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=2),
            scaled(over_tp(DDP(), ONE_WEIGHT, tp=2, split=Split.ROWWISE, features=2)),
        ],
    ),
    "ddp_static_graph_no_sync": (
        scenario(DDP(static_graph=True, no_sync=True), data=Data(microbatches=(2, 2))),
        [
            scenario(DDP(static_graph=True), data=Data(microbatches=(2, 2))),
            scenario(DDP(static_graph=True, no_sync=True)),
            scenario(DDP(no_sync=True), data=Data(microbatches=(2, 2))),
        ],
    ),
}
