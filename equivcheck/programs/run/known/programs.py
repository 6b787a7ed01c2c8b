"""The smallest program that shows each known difference."""

from __future__ import annotations

from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, RoundTrip, Statement, TensorProgram

TWO = (2,)
Shape = tuple[int, ...]


def _of(name: str, *leaves: Leaf | Constant, dim: int = 0, then: tuple[Statement, ...] = (), mesh: Shape = TWO) -> TensorProgram:
    """Apply an operation to leaves, in order."""
    operation = Operation(name=name, arguments=tuple(range(len(leaves), 0, -1)), dim=dim)
    return TensorProgram(mesh=mesh, statements=(*leaves, operation, *then))


def _leaf(placement: str, *shape: int, seed: int = 0) -> Leaf:
    return Leaf(shape=shape, placements=(placement,), seed=seed)


def _indices(placement: str, *shape: int, high: int) -> Constant:
    return Constant(shape=shape, placements=(placement,), contents=Contents.INDICES, high=high)


SMALLEST_PROGRAMS: dict[str, TensorProgram] = {
    "dtensor_scan_along_negative_dim": _of("cumsum", _leaf("S(0)", 2), dim=-1),
    "dtensor_mean_losses": _of("huber_loss_mean", _leaf("S(0)", 3), _leaf("S(0)", 3, seed=1)),
    "dtensor_writes_to_slices": _of("mul_slice", _leaf("S(0)", 2)),
    "dtensor_shifts_nothing": _of("shift_right", _leaf("R", 4)),
    "dtensor_item_of_addends": _of("item", _leaf("S(0)", 2)),
    "dtensor_gradient_of_maximum": _of("amax_all", _leaf("S(0)", 2, seed=2)),
    "dtensor_norm_of_maxima": _of("norm_inf", _leaf("P(max)", 2)),
    "dtensor_sum_of_norms": _of("norm_dim", _leaf("S(1)", 2, 2), dim=1, then=(Operation(name="sum"),)),
    "dtensor_sgn_of_norms": _of("norm_dim", _leaf("S(1)", 2, 2), dim=1, then=(Operation(name="sgn_", arguments=(1,)),)),
    "dtensor_sum_of_norms_into_another": _of(
        "norm_dim", _leaf("S(1)", 2, 2), dim=1, then=(Operation(name="add_out", arguments=(1, 1)),)
    ),
    "dtensor_joins_norms_with_others": TensorProgram(
        mesh=TWO,
        statements=(
            _leaf("S(1)", 2, 2),
            Operation(name="norm_dim", dim=1),
            _leaf("R", 2),
            Operation(name="cat", arguments=(2, 1)),
        ),
    ),
    "dtensor_masks_rows_of_other_shape": _of("embedding_flat", _leaf("S(0)", 2, 1), _indices("R", 1, 2, high=2)),
    "dtensor_masks_what_joins_rows": _of("embedding_stacked", _leaf("S(0)", 2, 1), _indices("R", 1, 2, high=2)),
    "dtensor_any_counts_ranks": _of("any_dim", _leaf("S(0)", 4), then=(Operation(name="sum"),)),
    "dtensor_slice_backward": TensorProgram(
        mesh=TWO,
        statements=(
            _leaf("R", 3),
            Operation(name="narrow", dim=-1),
            _leaf("S(0)", 2),
            Operation(name="mul", arguments=(2, 1)),
        ),
    ),
    "dtensor_transposed_in_place_keeps_shape": _of("t_", _leaf("R", 2, 1)),
    "dtensor_threshold_of_maxima": _of("threshold", _leaf("P(max)", 2)),
    "dtensor_lerp_of_pending_weight": _of("lerp", _leaf("R", 2), _leaf("R", 2, seed=1), _leaf("P(sum)", 2, seed=2)),
    "dtensor_index_add_to_addends": _of("index_add_own", _leaf("P(sum)", 2), _indices("R", 3, high=2)),
    "dtensor_fill_addends": _of("fill_", _leaf("P(sum)", 2)),
    "dtensor_addends_plus_number": _of("add_scalar", _leaf("P(sum)", 2)),
    "dtensor_bits_of_addends": _of("real_view", _leaf("P(sum)", 2)),
    "dtensor_promotion_with_pending_scalar": _of("one_hot", _leaf("S(0)", 2), _indices("R", 3, high=2)),
    "dtensor_convolution_of_cut_weight": _of("conv1d_padded", _leaf("R", 2, 2, 3), _leaf("S(0)", 4, 2, 3, seed=1)),
    "dtensor_convolution_of_planes": _of("conv1d_padded", _leaf("R", 2, 4, 6), _leaf("S(1)", 4, 4, 3, seed=1)),
    "dtensor_convolution_says_other_size": _of("conv1d", _leaf("P(sum)", 2, 4, 6), _leaf("S(0)", 4, 4, 3, seed=1)),
    "dtensor_convolution_backward_without_bias": TensorProgram(
        mesh=(1, 1),
        statements=(Leaf(shape=(1, 1, 3), placements=("S(0)", "R")), Operation(name="conv1d", arguments=(1, 1))),
    ),
    "dtensor_convolution_backward_of_planes": _of("conv1d_padded", _leaf("S(1)", 2, 4, 6), _leaf("S(1)", 4, 4, 3, seed=1)),
    "dtensor_foreach_of_pending_scalar": _of("foreach_add_tensor", _leaf("S(0)", 2), _leaf("R", 2, seed=1)),
    "dtensor_fused_update_of_other_placements": _of("fused_adam", _leaf("R", 2), _leaf("S(0)", 2, seed=1)),
    "dtensor_drops_generators": _of("generated_normal_", _leaf("R", 2)),
    "dtensor_random_of_parts": _of("seeded_rand_like", _leaf("S(0)", 2)),
    "dtensor_embedding_counts_own_indices": _of("embedding_scaled", _leaf("R", 2, 1), _indices("S(0)", 4, high=2)),
    "dtensor_embedding_transposed_before_masked": _of(
        "embedding_transposed",
        _leaf("S(0)", 2, 1),
        Constant(shape=(2, 2), placements=("R",), contents=Contents.INDICES, high=2, seed=5),
    ),
    "dtensor_fills_empty_addends": _of("empty_like_filled", _leaf("P(sum)", 2)),
    "dtensor_fills_new_partials": TensorProgram(
        mesh=(1, 2), statements=(Leaf(shape=(1,), placements=("S(0)", "P(sum)")), Operation(name="new_full"))
    ),
    "dtensor_data_of_other_placements": _of("set_data", _leaf("R", 2), _leaf("S(0)", 2, seed=1)),
    "dtensor_determinant_of_transposed": TensorProgram(
        mesh=TWO, statements=(Leaf(shape=(2, 2), placements=("S(0)",)), Operation(name="t"), Operation(name="det"))
    ),
    "dtensor_statistics_of_batch_norm": _of("batch_norm_statistics", _leaf("S(1)", 4, 2)),
    "dtensor_foreach_norm_of_nothing": _of("foreach_norm_inf", _leaf("R", 1), _leaf("S(0)", 1, seed=1)),
    "dtensor_solve_triangular_of_parts": _of("solve_triangular", _leaf("S(1)", 2, 3, 3), _leaf("S(0)", 2, 3, 2, seed=1)),
    "dtensor_shuffles_parts": _of("pixel_unshuffle", _leaf("S(3)", 1, 1, 2, 6)),
    "dtensor_masked_by_other_shapes": _of("assign_masked", _leaf("S(1)", 2, 2)),
    "dtensor_divides_integers": _of(
        "to_int",
        _leaf("S(0)", 2),
        then=(
            Operation(name="sum"),
            Constant(shape=(), placements=("R",), contents=Contents.INDICES),
            Operation(name="add", arguments=(2, 1)),
        ),
    ),
    "dtensor_split_of_no_elements": _of("split_rows", _leaf("R", 0)),
    "dtensor_mean_of_no_dims": _of("mean_of_nothing_kept", _leaf("S(0)", 2)),
    "dtensor_logsumexp_of_scalar": _of("logsumexp_all", _leaf("R")),
    "dtensor_expands_one_row": _of("expand_first", _leaf("S(0)", 1), mesh=(1,)),
    "dtensor_squeezes_local_tensor_alone": _of("vecmat", _leaf("R", 2, 2), _leaf("R", 2, seed=1)),
    "dtensor_index_add_of_cut_index": TensorProgram(
        mesh=(2, 1),
        statements=(
            Leaf(shape=(1, 2), placements=("R", "R")),
            Constant(shape=(1,), placements=("R", "S(0)"), contents=Contents.INDICES),
            Operation(name="index_add_own", arguments=(2, 1)),
        ),
    ),
    "dtensor_unsafe_split_into_one": _of("split_unsafe", _leaf("R", 1), mesh=(1,)),
    "dtensor_eye_of_rows": _of("init_eye", _leaf("S(0)", 2, 2)),
    "dtensor_mean_of_counted_rows": _of(
        "cross_entropy_ignoring_mean",
        _leaf("S(0)", 6, 2, 2),
        Constant(shape=(6, 2), placements=("R",), contents=Contents.INDICES, high=2, seed=2),
    ),
    "dtensor_extreme_of_empty_shard": _of("max_all", _leaf("S(0)", 1)),
    "dtensor_pool_of_empty_shard": _of("max_pool1d", _leaf("S(1)", 1, 4, 2), mesh=(3,)),
    "dtensor_squeeze_of_no_elements": _of("squeeze", _leaf("S(1)", 0, 4)),
    "dtensor_position_of_extreme": _of("argmax", _leaf("S(0)", 2, 1), dim=-2),
    "dtensor_view_of_uneven_parts": TensorProgram(
        mesh=(1, 2), statements=(Leaf(shape=(3, 2), placements=("S(0)", "S(0)")), Operation(name="einsum_trace"))
    ),
    "dtensor_transpose_of_scalar": _of("ravel_transposed", _leaf("R"), mesh=(1,)),
    "dtensor_group_norm_of_no_elements": _of("group_norm_weight", _leaf("R", 1, 0), _leaf("R", 0), mesh=(1,)),
    "dtensor_bits_of_mean": TensorProgram(
        mesh=TWO,
        statements=(
            _leaf("R"),
            _leaf("S(0)", 2),
            Operation(name="l1_loss_mean", arguments=(2, 1)),
            Operation(name="real_view"),
        ),
    ),
    "dtensor_group_norm_of_weight_alone": TensorProgram(
        mesh=(1,),
        statements=(
            _leaf("R", 1, 1, 2),
            Operation(name="init_zeros"),
            _leaf("R", 1),
            Operation(name="group_norm_weight", arguments=(2, 1)),
        ),
    ),
    "dtensor_group_norm_of_cut_weight": _of("group_norm_weight", _leaf("R", 4, 1), _leaf("S(0)", 1)),
    "dtensor_select_backward": TensorProgram(
        mesh=(2, 2), statements=(Leaf(shape=(4, 2), placements=("S(0)", "S(0)")), Operation(name="select", dim=-1))
    ),
    "dtensor_norm_backward_of_dim_cut_twice": TensorProgram(
        mesh=(2, 2), statements=(Leaf(shape=(4,), placements=("S(0)", "S(0)")), Operation(name="norm_inf"))
    ),
    "dtensor_upsample_of_no_elements": _of("interpolate", _leaf("R", 0, 1, 1), mesh=(1,)),
    "dtensor_remembers_number_for_tensor": _of(
        "norm_dim",
        _leaf("S(1)", 4, 3),
        dim=1,
        then=(Operation(name="scale_by_size"), Operation(name="foreach_norm", arguments=(2, 2))),
    ),
    "dtensor_equal_of_other_shapes": _of(
        "equal", _leaf("S(2)", 1, 1, 1), Constant(shape=(1,), placements=("R",), contents=Contents.ORDER)
    ),
    "dtensor_out_of_addends": _of("mul_out", _leaf("P(max)", 2), _leaf("R", 2, seed=1)),
    "dtensor_attention_of_cut_features": _of(
        "attention", _leaf("R", 2, 2, 3, 4), _leaf("R", 2, 2, 3, 4, seed=1), _leaf("S(3)", 2, 2, 3, 4, seed=2)
    ),
    "dtensor_adaptive_pool_backward_without_batch": _of("adaptive_avg_pool2d", _leaf("S(1)", 1, 3, 2)),
    "dtensor_lu_solve_backward_of_batches": _of("lu_solve", _leaf("R", 2, 3, 3), _leaf("S(0)", 2, 3, 2, seed=1)),
    "dtensor_takes_tensor_for_number": TensorProgram(
        mesh=TWO,
        statements=(
            _leaf("P(max)", 2),
            Constant(shape=(2,), placements=("R",), contents=Contents.MASK),
            Operation(name="masked_scatter", arguments=(2, 1)),
            _indices("R", 1, high=2),
            Operation(name="scaled_by_targets", arguments=(4, 1)),
        ),
    ),
    "dtensor_unflattens_for_axis_of_one_rank": TensorProgram(
        mesh=(2, 1), statements=(Leaf(shape=(2, 2, 2), placements=("S(1)", "S(1)")), Operation(name="instance_norm"))
    ),
    "dtensor_view_of_strided_part": TensorProgram(
        mesh=TWO, statements=(_leaf("S(0)", 2, 5), Redistribution(placements=("S(1)",)), Operation(name="prod"))
    ),
    "dtensor_unused_result": TensorProgram(
        mesh=(1,),
        statements=(
            _leaf("R"),
            Redistribution(placements=("R",)),
            _leaf("R"),
            Operation(name="foreach_norm_1", arguments=(1, 2)),
        ),
    ),
    "dtensor_embedding_read_twice": _of(
        "embedding", _leaf("S(0)", 2, 1), _indices("R", 1, high=2), then=(Operation(name="clone"),)
    ),
    "dtensor_embedding_gathered_before_masked": TensorProgram(
        mesh=(2, 2),
        statements=(
            Leaf(shape=(2, 1), placements=("S(0)", "R")),
            Constant(shape=(2,), placements=("R", "S(0)"), contents=Contents.INDICES, high=2),
            Operation(name="embedding", arguments=(2, 1)),
        ),
    ),
    "dtensor_embedding_of_no_rows": _of("embedding", _leaf("S(0)", 5, 2), _indices("R", 1, high=5), mesh=(4,)),
    "dtensor_cat_of_nothing": TensorProgram(
        mesh=(1,),
        statements=(Leaf(shape=(0,), placements=("R",)), RoundTrip(), Operation(name="cat", arguments=(1, 1))),
    ),
    "dtensor_searchsorted_of_moved_parts": TensorProgram(
        mesh=(2,),
        statements=(
            Leaf(shape=(2, 1, 3), placements=("S(1)",)),
            Redistribution(placements=("S(2)",)),
            _indices("R", high=2),
            Operation(name="searchsorted", arguments=(2, 1)),
        ),
    ),
    "dtensor_norm_along_negative_dim_of_no_elements": _of("norm_dim_inf", _leaf("R", 0, 1), dim=-1),
    "dtensor_endless_view": _of("view_flat", _leaf("R", 0, 3), mesh=(1,)),
    "dtensor_foreach_in_place_of_partial": _of("foreach_mul_scalar_", _leaf("P(sum)", 2), _leaf("R", 2, seed=1)),
    "dtensor_pad_on_several_axes": TensorProgram(
        mesh=(1, 2), statements=(Leaf(shape=(2,), placements=("R", "P(sum)")), Operation(name="pad_last"))
    ),
    "dtensor_stack_along_negative_dim": TensorProgram(
        mesh=TWO, statements=(_leaf("S(0)", 2), Operation(name="stack", arguments=(1, 1), dim=-1))
    ),
    "dtensor_index_put_of_shards": _of("index_put_add", _leaf("S(0)", 4), _indices("R", 3, high=4)),
    "dtensor_index_of_later_dim_backward": _of("index_last", _leaf("R", 1, 1), _indices("R", 1, high=1), mesh=(1,)),
    "dtensor_layer_norm_backward_of_sharded_weight": _of("layer_norm_weight", _leaf("R", 2, 2), _leaf("S(0)", 2, seed=1)),
    "dtensor_squeeze_of_shards_of_one_element": _of("squeeze", _leaf("S(0)", 2)),
    "dtensor_convolution_without_bias": _of("conv1d_padded", _leaf("R", 1, 1, 3), _leaf("R", 1, 1, 3, seed=1), mesh=(1,)),
    "dtensor_convolution_on_one_rank": _of("conv1d_padded", _leaf("S(2)", 1, 1, 3), _leaf("R", 1, 1, 3, seed=1), mesh=(1,)),
    "dtensor_batch_norm_backward_without_weight": _of(
        "batch_norm_running", _leaf("R", 1, 1), Constant(shape=(1,), placements=("R",), contents=Contents.WEIGHTS), mesh=(1,)
    ),
    "dtensor_index_select_backward_of_sharded_index": _of("index_select", _leaf("R", 2), _indices("S(0)", 2, high=2)),
    "dtensor_in_place_of_partial": _of("relu_", _leaf("P(sum)", 2)),
    "dtensor_mean_of_shards": _of("mean", _leaf("S(0)", 1)),
    "dtensor_all_of_shards": _of("all_all", _leaf("S(0)", 2)),
    "dtensor_norm_of_partial": _of("clip_grads", _leaf("P(sum)", 2), _leaf("R", 2, seed=1)),
    "dtensor_position_along_sharded_dim": TensorProgram(
        mesh=TWO, statements=(_leaf("S(0)", 4), Operation(name="max_dim", output=1))
    ),
    "dtensor_round_trip_of_partial": TensorProgram(mesh=TWO, statements=(_leaf("P(sum)", 2), RoundTrip())),
    "dtensor_pads_nothing": TensorProgram(mesh=TWO, statements=(_leaf("S(0)", 1, 0),)),
    "dtensor_select_changes_its_input": _of("assign_first", _leaf("R", 2), mesh=(1,)),
    "dtensor_t_of_vector": _of("t", _leaf("S(0)", 2)),
    "dtensor_index_select_along_negative_dim": _of("index_select", _leaf("R", 2), _indices("R", 2, high=2), dim=-1),
    "dtensor_norm_along_dim_of_one_element": _of("norm_dim", _leaf("S(1)", 2, 2, 1), dim=-1),
    "dtensor_position_in_all_dims": _of("argmax_all", _leaf("S(0)", 2)),
    "dtensor_view_of_gathered_part": TensorProgram(
        mesh=TWO, statements=(_leaf("S(1)", 2, 5), Redistribution(placements=("R",)), Operation(name="flatten"))
    ),
    "dtensor_scatter_in_place_of_shards": _of("scatter_", _leaf("S(0)", 2, 2), _indices("R", 2, 2, high=2)),
    "dtensor_assignment_by_mask": _of("assign_masked", _leaf("R"), mesh=(1,)),
    "dtensor_redistribution_of_partial_backward": TensorProgram(
        mesh=TWO,
        statements=(
            _leaf("P(sum)", 2),
            Redistribution(placements=("R",)),
            _leaf("S(0)", 2, 1, seed=2),
            Operation(name="add", arguments=(2, 1)),
        ),
    ),
    "dtensor_squeeze_in_place_of_shard": _of("squeeze_", _leaf("S(0)", 1)),
}
"""Programs by the known difference's identifier."""
