"""The smallest program that shows each known difference."""

from __future__ import annotations

from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, RoundTrip, Statement, TensorProgram


def _program(*statements: Statement, mesh: tuple[int, ...] = (2,)) -> TensorProgram:
    return TensorProgram(mesh=mesh, statements=statements)


def _leaf(placements: str, *shape: int, seed: int = 0) -> Leaf:
    return Leaf(shape=shape, placements=tuple(placements.split()), seed=seed)


def _constant(placements: str, *shape: int, contents: Contents = Contents.INDICES, high: int = 1, seed: int = 0) -> Constant:
    return Constant(shape=shape, placements=tuple(placements.split()), contents=contents, high=high, seed=seed)


def _operation(name: str, *arguments: int, dim: int = 0, output: int = 0) -> Operation:
    return Operation(name=name, arguments=arguments or (1,), dim=dim, output=output)


def _redistribution(placements: str) -> Redistribution:
    return Redistribution(placements=tuple(placements.split()))


SMALLEST_PROGRAMS: dict[str, TensorProgram] = {
    "dtensor_scan_along_negative_dim": _program(_leaf("S(0)", 2), _operation("cumsum", dim=-1)),
    "dtensor_mean_losses": _program(_leaf("S(0)", 3), _leaf("S(0)", 3, seed=1), _operation("huber_loss_mean", 2, 1)),
    "dtensor_writes_to_slices": _program(_leaf("S(0)", 2), _operation("mul_slice")),
    "dtensor_shifts_nothing": _program(_leaf("R", 4), _operation("shift_right")),
    "dtensor_item_of_addends": _program(_leaf("S(0)", 2), _operation("item")),
    "dtensor_gradient_of_maximum": _program(_leaf("S(0)", 2, seed=2), _operation("amax_all")),
    "dtensor_norm_of_maxima": _program(_leaf("P(max)", 2), _operation("norm_inf")),
    "dtensor_sum_of_norms": _program(_leaf("S(1)", 2, 2), _operation("norm_dim", dim=1), _operation("sum")),
    "dtensor_sgn_of_norms": _program(_leaf("S(1)", 2, 2), _operation("norm_dim", dim=1), _operation("sgn_")),
    "dtensor_sum_of_norms_into_another": _program(
        _leaf("S(1)", 2, 2), _operation("norm_dim", dim=1), _operation("add_out", 1, 1)
    ),
    "dtensor_joins_norms_with_others": _program(
        _leaf("S(1)", 2, 2), _operation("norm_dim", dim=1), _leaf("R", 2), _operation("cat", 2, 1)
    ),
    "dtensor_masks_rows_of_other_shape": _program(
        _leaf("S(0)", 2, 1), _constant("R", 1, 2, high=2), _operation("embedding_flat", 2, 1)
    ),
    "dtensor_masks_what_joins_rows": _program(
        _leaf("S(0)", 2, 1), _constant("R", 1, 2, high=2), _operation("embedding_stacked", 2, 1)
    ),
    "dtensor_any_counts_ranks": _program(_leaf("S(0)", 4), _operation("any_dim"), _operation("sum")),
    "dtensor_slice_backward": _program(_leaf("R", 3), _operation("narrow", dim=-1), _leaf("S(0)", 2), _operation("mul", 2, 1)),
    "dtensor_transposed_in_place_keeps_shape": _program(_leaf("R", 2, 1), _operation("t_")),
    "dtensor_threshold_of_maxima": _program(_leaf("P(max)", 2), _operation("threshold")),
    "dtensor_lerp_of_pending_weight": _program(
        _leaf("R", 2), _leaf("R", 2, seed=1), _leaf("P(sum)", 2, seed=2), _operation("lerp", 3, 2, 1)
    ),
    "dtensor_index_add_to_addends": _program(_leaf("P(sum)", 2), _constant("R", 3, high=2), _operation("index_add_own", 2, 1)),
    "dtensor_fill_addends": _program(_leaf("P(sum)", 2), _operation("fill_")),
    "dtensor_addends_plus_number": _program(_leaf("P(sum)", 2), _operation("add_scalar")),
    "dtensor_bits_of_addends": _program(_leaf("P(sum)", 2), _operation("real_view")),
    "dtensor_promotion_with_pending_scalar": _program(_leaf("S(0)", 2), _constant("R", 3, high=2), _operation("one_hot", 2, 1)),
    "dtensor_convolution_of_cut_weight": _program(
        _leaf("R", 2, 2, 3), _leaf("S(0)", 4, 2, 3, seed=1), _operation("conv1d_padded", 2, 1)
    ),
    "dtensor_convolution_of_planes": _program(
        _leaf("R", 2, 4, 6), _leaf("S(1)", 4, 4, 3, seed=1), _operation("conv1d_padded", 2, 1)
    ),
    "dtensor_convolution_says_other_size": _program(
        _leaf("P(sum)", 2, 4, 6), _leaf("S(0)", 4, 4, 3, seed=1), _operation("conv1d", 2, 1)
    ),
    "dtensor_convolution_backward_without_bias": _program(_leaf("S(0) R", 1, 1, 3), _operation("conv1d", 1, 1), mesh=(1, 1)),
    "dtensor_convolution_backward_of_planes": _program(
        _leaf("S(1)", 2, 4, 6), _leaf("S(1)", 4, 4, 3, seed=1), _operation("conv1d_padded", 2, 1)
    ),
    "dtensor_foreach_of_pending_scalar": _program(
        _leaf("S(0)", 2), _leaf("R", 2, seed=1), _operation("foreach_add_tensor", 2, 1)
    ),
    "dtensor_backward_of_writes_to_uneven_slices": _program(
        _leaf("S(0)", 3, seed=4), _operation("scale_by_size"), _operation("zero_last", 2)
    ),
    "dtensor_foreach_pow_of_tensors": _program(
        _leaf("S(0)", 2), _leaf("P(sum)", 2, seed=1), _operation("foreach_pow_list", 2, 1)
    ),
    "dtensor_fused_update_of_other_placements": _program(_leaf("R", 2), _leaf("S(0)", 2, seed=1), _operation("fused_adam", 2, 1)),
    "dtensor_drops_generators": _program(_leaf("R", 2), _operation("generated_normal_")),
    "dtensor_random_of_parts": _program(_leaf("S(0)", 2), _operation("seeded_rand_like")),
    "dtensor_embedding_counts_own_indices": _program(
        _leaf("R", 2, 1), _constant("S(0)", 4, high=2), _operation("embedding_scaled", 2, 1)
    ),
    "dtensor_embedding_transposed_before_masked": _program(
        _leaf("S(0)", 2, 1), _constant("R", 2, 2, high=2, seed=5), _operation("embedding_transposed", 2, 1)
    ),
    "dtensor_fills_empty_addends": _program(_leaf("P(sum)", 2), _operation("empty_like_filled")),
    "dtensor_fills_new_partials": _program(_leaf("S(0) P(sum)", 1), _operation("new_full"), mesh=(1, 2)),
    "dtensor_data_of_other_placements": _program(_leaf("R", 2), _leaf("S(0)", 2, seed=1), _operation("set_data", 2, 1)),
    "dtensor_determinant_of_transposed": _program(_leaf("S(0)", 2, 2), _operation("t"), _operation("det")),
    "dtensor_statistics_of_batch_norm": _program(_leaf("S(1)", 4, 2), _operation("batch_norm_statistics")),
    "dtensor_foreach_norm_of_nothing": _program(_leaf("R", 1), _leaf("S(0)", 1, seed=1), _operation("foreach_norm_inf", 2, 1)),
    "dtensor_solve_triangular_of_parts": _program(
        _leaf("S(1)", 2, 3, 3), _leaf("S(0)", 2, 3, 2, seed=1), _operation("solve_triangular", 2, 1)
    ),
    "dtensor_shuffles_parts": _program(_leaf("S(3)", 1, 1, 2, 6), _operation("pixel_unshuffle")),
    "dtensor_masked_by_other_shapes": _program(_leaf("S(1)", 2, 2), _operation("assign_masked")),
    "dtensor_divides_integers": _program(
        _leaf("S(0)", 2), _operation("to_int"), _operation("sum"), _constant("R"), _operation("add", 2, 1)
    ),
    "dtensor_split_of_no_elements": _program(_leaf("R", 0), _operation("split_rows")),
    "dtensor_mean_of_no_dims": _program(_leaf("S(0)", 2), _operation("mean_of_nothing_kept")),
    "dtensor_logsumexp_of_scalar": _program(_leaf("R"), _operation("logsumexp_all")),
    "dtensor_expands_one_row": _program(_leaf("S(0)", 1), _operation("expand_first"), mesh=(1,)),
    "dtensor_squeezes_local_tensor_alone": _program(_leaf("R", 2, 2), _leaf("R", 2, seed=1), _operation("vecmat", 2, 1)),
    "dtensor_index_add_of_cut_index": _program(
        _leaf("R R", 1, 2), _constant("R S(0)", 1), _operation("index_add_own", 2, 1), mesh=(2, 1)
    ),
    "dtensor_unsafe_split_into_one": _program(_leaf("R", 1), _operation("split_unsafe"), mesh=(1,)),
    "dtensor_eye_of_rows": _program(_leaf("S(0)", 2, 2), _operation("init_eye")),
    "dtensor_mean_of_counted_rows": _program(
        _leaf("S(0)", 6, 2, 2), _constant("R", 6, 2, high=2, seed=2), _operation("cross_entropy_ignoring_mean", 2, 1)
    ),
    "dtensor_extreme_of_empty_shard": _program(_leaf("S(0)", 1), _operation("max_all")),
    "dtensor_pool_of_empty_shard": _program(_leaf("S(1)", 1, 4, 2), _operation("max_pool1d"), mesh=(3,)),
    "dtensor_squeeze_of_no_elements": _program(_leaf("S(1)", 0, 4), _operation("squeeze")),
    "dtensor_position_of_extreme": _program(_leaf("S(0)", 2, 1), _operation("argmax", dim=-2)),
    "dtensor_view_of_uneven_parts": _program(_leaf("S(0) S(0)", 3, 2), _operation("einsum_trace"), mesh=(1, 2)),
    "dtensor_transpose_of_scalar": _program(_leaf("R"), _operation("ravel_transposed"), mesh=(1,)),
    "dtensor_group_norm_of_no_elements": _program(
        _leaf("R", 1, 0), _leaf("R", 0), _operation("group_norm_weight", 2, 1), mesh=(1,)
    ),
    "dtensor_bits_of_mean": _program(_leaf("R"), _leaf("S(0)", 2), _operation("l1_loss_mean", 2, 1), _operation("real_view")),
    "dtensor_group_norm_of_weight_alone": _program(
        _leaf("R", 1, 1, 2), _operation("init_zeros"), _leaf("R", 1), _operation("group_norm_weight", 2, 1), mesh=(1,)
    ),
    "dtensor_group_norm_of_cut_weight": _program(_leaf("R", 4, 1), _leaf("S(0)", 1), _operation("group_norm_weight", 2, 1)),
    "dtensor_select_backward": _program(_leaf("S(0) S(0)", 4, 2), _operation("select", dim=-1), mesh=(2, 2)),
    "dtensor_norm_backward_of_dim_cut_twice": _program(_leaf("S(0) S(0)", 4), _operation("norm_inf"), mesh=(2, 2)),
    "dtensor_upsample_of_no_elements": _program(_leaf("R", 0, 1, 1), _operation("interpolate"), mesh=(1,)),
    "dtensor_remembers_number_for_tensor": _program(
        _leaf("S(1)", 4, 3), _operation("norm_dim", dim=1), _operation("scale_by_size"), _operation("foreach_norm", 2, 2)
    ),
    "dtensor_equal_of_other_shapes": _program(
        _leaf("S(2)", 1, 1, 1), _constant("R", 1, contents=Contents.ORDER), _operation("equal", 2, 1)
    ),
    "dtensor_out_of_addends": _program(_leaf("P(max)", 2), _leaf("R", 2, seed=1), _operation("mul_out", 2, 1)),
    "dtensor_attention_of_cut_features": _program(
        _leaf("R", 2, 2, 3, 4),
        _leaf("R", 2, 2, 3, 4, seed=1),
        _leaf("S(3)", 2, 2, 3, 4, seed=2),
        _operation("attention", 3, 2, 1),
    ),
    "dtensor_adaptive_pool_backward_without_batch": _program(_leaf("S(1)", 1, 3, 2), _operation("adaptive_avg_pool2d")),
    "dtensor_lu_solve_backward_of_batches": _program(
        _leaf("R", 2, 3, 3), _leaf("S(0)", 2, 3, 2, seed=1), _operation("lu_solve", 2, 1)
    ),
    "dtensor_takes_tensor_for_number": _program(
        _leaf("P(max)", 2),
        _constant("R", 2, contents=Contents.MASK),
        _operation("masked_scatter", 2, 1),
        _constant("R", 1, high=2),
        _operation("scaled_by_targets", 4, 1),
    ),
    "dtensor_unflattens_for_axis_of_one_rank": _program(_leaf("S(1) S(1)", 2, 2, 2), _operation("instance_norm"), mesh=(2, 1)),
    "dtensor_view_of_strided_part": _program(_leaf("S(0)", 2, 5), _redistribution("S(1)"), _operation("prod")),
    "dtensor_unused_result": _program(
        _leaf("R"), _redistribution("R"), _leaf("R"), _operation("foreach_norm_1", 1, 2), mesh=(1,)
    ),
    "dtensor_embedding_read_twice": _program(
        _leaf("S(0)", 2, 1), _constant("R", 1, high=2), _operation("embedding", 2, 1), _operation("clone")
    ),
    "dtensor_embedding_gathered_before_masked": _program(
        _leaf("S(0) R", 2, 1), _constant("R S(0)", 2, high=2), _operation("embedding", 2, 1), mesh=(2, 2)
    ),
    "dtensor_embedding_of_no_rows": _program(
        _leaf("S(0)", 5, 2), _constant("R", 1, high=5), _operation("embedding", 2, 1), mesh=(4,)
    ),
    "dtensor_cat_of_nothing": _program(_leaf("R", 0), RoundTrip(), _operation("cat", 1, 1), mesh=(1,)),
    "dtensor_searchsorted_of_moved_parts": _program(
        _leaf("S(1)", 2, 1, 3), _redistribution("S(2)"), _constant("R", high=2), _operation("searchsorted", 2, 1)
    ),
    "dtensor_norm_along_negative_dim_of_no_elements": _program(_leaf("R", 0, 1), _operation("norm_dim_inf", dim=-1)),
    "dtensor_endless_view": _program(_leaf("R", 0, 3), _operation("view_flat"), mesh=(1,)),
    "dtensor_foreach_in_place_of_partial": _program(
        _leaf("P(sum)", 2), _leaf("R", 2, seed=1), _operation("foreach_mul_scalar_", 2, 1)
    ),
    "dtensor_pad_on_several_axes": _program(_leaf("R P(sum)", 2), _operation("pad_last"), mesh=(1, 2)),
    "dtensor_stack_along_negative_dim": _program(_leaf("S(0)", 2), _operation("stack", 1, 1, dim=-1)),
    "dtensor_index_put_of_shards": _program(_leaf("S(0)", 4), _constant("R", 3, high=4), _operation("index_put_add", 2, 1)),
    "dtensor_index_of_later_dim_backward": _program(
        _leaf("R", 1, 1), _constant("R", 1), _operation("index_last", 2, 1), mesh=(1,)
    ),
    "dtensor_layer_norm_backward_of_sharded_weight": _program(
        _leaf("R", 2, 2), _leaf("S(0)", 2, seed=1), _operation("layer_norm_weight", 2, 1)
    ),
    "dtensor_squeeze_of_shards_of_one_element": _program(_leaf("S(0)", 2), _operation("squeeze")),
    "dtensor_convolution_without_bias": _program(
        _leaf("R", 1, 1, 3), _leaf("R", 1, 1, 3, seed=1), _operation("conv1d_padded", 2, 1), mesh=(1,)
    ),
    "dtensor_convolution_on_one_rank": _program(
        _leaf("S(2)", 1, 1, 3), _leaf("R", 1, 1, 3, seed=1), _operation("conv1d_padded", 2, 1), mesh=(1,)
    ),
    "dtensor_batch_norm_backward_without_weight": _program(
        _leaf("R", 1, 1), _constant("R", 1, contents=Contents.WEIGHTS), _operation("batch_norm_running", 2, 1), mesh=(1,)
    ),
    "dtensor_index_select_backward_of_sharded_index": _program(
        _leaf("R", 2), _constant("S(0)", 2, high=2), _operation("index_select", 2, 1)
    ),
    "dtensor_in_place_of_partial": _program(_leaf("P(sum)", 2), _operation("relu_")),
    "dtensor_mean_of_shards": _program(_leaf("S(0)", 1), _operation("mean")),
    "dtensor_all_of_shards": _program(_leaf("S(0)", 2), _operation("all_all")),
    "dtensor_reduction_of_partial": _program(_leaf("P(sum)", 2), _operation("amax_all")),
    "dtensor_matrix_norm_of_shards": _program(_leaf("S(1)", 2, 2), _operation("matrix_norm_inf")),
    "dtensor_gathers_gradient_of_local_strides": _program(
        _leaf("S(0)", 1, 1), _leaf("S(0)", 1, 1, seed=1), RoundTrip(), _operation("where_scalar")
    ),
    "dtensor_writes_to_slices_of_partial": _program(_leaf("P(max)", 4), _operation("add_to_slice")),
    "dtensor_redistributes_to_other_reduction": _program(
        _leaf("R", 1, 2), _leaf("R", 2, 1), _leaf("P(avg)"), _operation("addmm", 3, 2, 1)
    ),
    "dtensor_batch_norm_of_no_channels": _program(
        _leaf("S(1)", 1, 4), _constant("R", 4, contents=Contents.WEIGHTS), _operation("batch_norm_running", 2, 1), mesh=(3,)
    ),
    "dtensor_cast_of_partial": _program(_leaf("P(sum)", 5, 3), _operation("to_int")),
    "dtensor_bucketize_of_partial": _program(_leaf("P(sum)"), _constant("R", 1), _operation("bucketize", 2, 1)),
    "dtensor_index_select_of_partial": _program(_leaf("P(sum)", 1), _constant("S(0)", 1), _operation("index_select", 2, 1)),
    "dtensor_index_copy_of_sharded_index": _program(
        _leaf("R", 2), _constant("S(0)", 2, contents=Contents.ORDER, high=2), _operation("index_copy", 2, 1)
    ),
    "dtensor_extreme_along_negative_sharded_dim": _program(_leaf("S(0)", 2), _operation("max_dim", dim=-1)),
    "dtensor_position_along_sharded_dim": _program(_leaf("S(0)", 4), _operation("max_dim", output=1)),
    "dtensor_round_trip_of_partial": _program(_leaf("P(sum)", 2), RoundTrip()),
    "dtensor_pads_nothing": _program(_leaf("S(0)", 1, 0)),
    "dtensor_select_changes_its_input": _program(_leaf("R", 2), _operation("assign_first"), mesh=(1,)),
    "dtensor_t_of_vector": _program(_leaf("S(0)", 2), _operation("t")),
    "dtensor_index_select_along_negative_dim": _program(
        _leaf("R", 2), _constant("R", 2, high=2), _operation("index_select", 2, 1, dim=-1)
    ),
    "dtensor_norm_along_dim_of_one_element": _program(_leaf("S(1)", 2, 2, 1), _operation("norm_dim", dim=-1)),
    "dtensor_position_in_all_dims": _program(_leaf("S(0)", 2), _operation("argmax_all")),
    "dtensor_view_of_gathered_part": _program(_leaf("S(1)", 2, 5), _redistribution("R"), _operation("flatten")),
    "dtensor_scatter_in_place_of_shards": _program(
        _leaf("S(0)", 2, 2), _constant("R", 2, 2, high=2), _operation("scatter_", 2, 1)
    ),
    "dtensor_assignment_by_mask": _program(_leaf("R"), _operation("assign_masked"), mesh=(1,)),
    "dtensor_redistribution_of_partial_backward": _program(
        _leaf("P(sum)", 2), _redistribution("R"), _leaf("S(0)", 2, 1, seed=2), _operation("add", 2, 1)
    ),
    "dtensor_squeeze_in_place_of_shard": _program(_leaf("S(0)", 1), _operation("squeeze_")),
}
"""Programs by the known difference's identifier."""
