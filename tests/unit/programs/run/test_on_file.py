"""Known DTensor errors explain the right programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, RoundTrip, Statement, TensorProgram
from equivcheck.programs.run.facts import facts_of
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from unit.programs.smallest import SMALLEST_PROGRAMS


def program(leaf: Leaf, *rest: Statement, mesh: tuple[int, ...] = (2,)) -> TensorProgram:
    """A leaf and more statements."""
    return TensorProgram(mesh=mesh, statements=(leaf, *rest))


def test_one_fact_of_several_is_enough() -> None:
    """A view of uneven shards is known; for even shards the same error would be new."""
    known = next(each for each in ON_FILE if each.id == "dtensor_view_of_uneven_parts")
    for size, expected in ((3, True), (4, False)):
        leaf = Leaf(shape=(size, 2), placements=("S(0)",))
        assert known.could_show(program(leaf, Operation(name="flatten"))) == expected


def test_what_is_replicated_and_what_was_not() -> None:
    """Redistributions count like leaves."""
    leaf, cut = Leaf(shape=(2,), placements=("R",)), Redistribution(placements=("S(0)",))
    assert "not replicated" not in facts_of(program(leaf, Redistribution(placements=("R",))))
    assert "not replicated" in facts_of(program(leaf, cut))


def test_a_sum_is_known_of_norms_alone() -> None:
    """A wrong sum of anything else would be new."""
    known = next(each for each in ON_FILE if each.id == "dtensor_sum_of_norms")
    leaf = Leaf(shape=(2, 2), placements=("S(1)",))
    for name, expected in (("norm_dim", is_torch_in(known.torch)), ("prod_dim", False)):
        assert known.could_show(program(leaf, Operation(name=name, dim=1), Operation(name="sum"))) == expected


def test_an_embedding_in_a_program_is_right_whatever_ran_before() -> None:
    """Before torch 2.11, DTensor caches the number of rows for the gradient. Each program starts without that cache."""
    indices = Constant(shape=(3,), placements=("R",), contents=Contents.INDICES, high=4)
    for rows in (4, 5, 6):
        looked_up = program(Leaf(shape=(rows, 2), placements=("S(0)",)), indices, Operation(name="embedding", arguments=(2, 1)))
        assert check_program(looked_up).outcome is Outcome.EQUIVALENT


def test_an_embedding_is_right_whatever_failed_before() -> None:
    """Before torch 2.14, cat leaves a mask behind, which must not affect the next embedding."""
    weight, indices = (
        Leaf(shape=(2, 1), placements=("S(0)",)),
        Constant(shape=(2, 2), placements=("R",), contents=Contents.INDICES, high=2),
    )
    looked_up = Operation(name="embedding", arguments=(2, 1))
    check_program(
        program(weight, indices, looked_up, Leaf(shape=(2, 2, 1), placements=("R",)), Operation(name="cat", arguments=(2, 1)))
    )
    assert check_program(program(weight, replace(indices, seed=3), looked_up)).outcome is Outcome.EQUIVALENT


def test_a_program_ends_alike_whatever_ran_before() -> None:
    """DTensor reuses the sharding of eye_'s first matrix. Each program starts without that cache."""
    matrices = [program(Leaf(shape=(2, 2), placements=(placement,)), Operation(name="init_eye")) for placement in ("R", "S(0)")]
    first = [check_program(each).outcome for each in matrices]
    assert [check_program(each).outcome for each in reversed(matrices)] == first[::-1]


CUT_TWICE = ("S(0)", "S(0)")
ALSO: dict[str, tuple[Leaf, *tuple[Statement, ...]]] = {
    "dtensor_view_of_uneven_parts, of partials that are scattered over a dim which another axis shards": (
        Leaf(shape=(2, 6), placements=("S(1)", "P(sum)")),
        Operation(name="ravel_transposed"),
    ),
    "dtensor_convolution_of_planes, of kernels of which a rank has none": (
        Leaf(shape=(2, 4, 6), placements=("S(2)", "S(0)")),
        Leaf(shape=(4, 4, 3), placements=("S(2)", "S(2)"), seed=1),
        Operation(name="conv1d_stride", arguments=(2, 1)),
    ),
    "dtensor_shuffles_parts, of uneven shards": (Leaf(shape=(1, 4, 1, 3), placements=("S(3)",)), Operation(name="pixel_shuffle")),
    "dtensor_fills_new_partials, of ones": (Leaf(shape=(2, 3), placements=("P(sum)", "S(0)")), Operation(name="new_ones")),
    "dtensor_split_of_no_elements, of which a slice is left": (
        Leaf(shape=(1,), placements=("R",)),
        Operation(name="slice_nothing"),
        Operation(name="split_rows"),
    ),
    "dtensor_data_of_other_placements, as what is read has another shape": (
        Leaf(shape=(), placements=("R",)),
        Leaf(shape=(1,), placements=("S(0)",)),
        Operation(name="set_data", arguments=(1, 2)),
    ),
    "dtensor_equal_of_other_shapes, of two cuts": (
        Leaf(shape=(1,), placements=("R", "S(0)")),
        Leaf(shape=(1, 1), placements=("S(0)", "S(1)")),
        Operation(name="equal", arguments=(1, 2)),
    ),
    "dtensor_equal_of_other_shapes, by a dim that one has": (
        Leaf(shape=(1, 1), placements=("S(1)",)),
        Operation(name="flatten_to", dim=1),
        Operation(name="equal", arguments=(1, 2)),
    ),
    "dtensor_random_of_parts, which leave nothing to choose from": (
        Leaf(shape=(2, 4), placements=("S(1)",)),
        Operation(name="seeded_bernoulli_"),
        Operation(name="seeded_multinomial"),
    ),
    "dtensor_bits_of_addends, as a copy shows": (
        Leaf(shape=(), placements=("R",)),
        Leaf(shape=(1,), placements=("S(0)",)),
        Operation(name="foreach_norm_1", arguments=(2, 1), output=1),
        Operation(name="real_view"),
        Operation(name="clone"),
    ),
    "dtensor_select_backward, by the shape it writes to": (
        Leaf(shape=(4, 4, 4), placements=CUT_TWICE),
        Operation(name="select", dim=-1),
    ),
    "dtensor_norm_backward_of_dim_cut_twice, of the largest": (
        Leaf(shape=(4,), placements=CUT_TWICE),
        Operation(name="amax_all"),
    ),
    "dtensor_promotion_with_pending_scalar, where dtypes must agree": (
        Leaf(shape=(1,), placements=("S(0)",)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES),
        Operation(name="one_hot", arguments=(2, 1)),
        Operation(name="isclose", arguments=(1, 3)),
    ),
    "dtensor_endless_view, as the stack says": (
        Leaf(shape=(0, 2, 0), placements=("S(0)",)),
        Constant(shape=(0, 0), placements=("S(0)",), contents=Contents.INDICES, high=2),
        Operation(name="cross_entropy_smooth_sum", arguments=(2, 1)),
    ),
    "dtensor_endless_view, of a slice without elements": (
        Leaf(shape=(1,), placements=("R",)),
        Operation(name="slice_end"),
        Operation(name="reshape_minus_2"),
    ),
    "dtensor_data_of_other_placements, of another shape": (
        Leaf(shape=(), placements=("R",)),
        Leaf(shape=(1,), placements=("R",)),
        Operation(name="set_data", arguments=(2, 1)),
    ),
    "dtensor_eye_of_rows, as what is computed of a part too many shows": (
        Leaf(shape=(1, 1), placements=("S(0)",)),
        Operation(name="init_eye"),
        Operation(name="norm_1"),
    ),
    "dtensor_gradient_of_maximum, beside a view that is the tensor itself": (
        Leaf(shape=(2,), placements=("S(0)",)),
        Operation(name="amax_all"),
        Operation(name="flatten_to", arguments=(2,)),
    ),
    "dtensor_eye_of_rows, of other shapes": (Leaf(shape=(1, 3), placements=("S(1)",)), Operation(name="init_eye")),
    "dtensor_mean_of_no_dims, where nothing raises": (
        Leaf(shape=(2,), placements=("S(0)",)),
        Operation(name="mean_of_nothing_kept"),
        Operation(name="logcumsumexp"),
    ),
    "dtensor_foreach_norm_of_nothing, of maxima": (
        Leaf(shape=(1,), placements=("R",)),
        Leaf(shape=(1,), placements=("S(0)",), seed=1),
        Operation(name="foreach_max", arguments=(2, 1)),
    ),
    "dtensor_gradient_of_maximum, of the smallest": (Leaf(shape=(2,), placements=("S(0)",)), Operation(name="norm_minus_inf")),
    "dtensor_extreme_of_empty_shard, of the smallest": (
        Leaf(shape=(1,), placements=("S(0)",)),
        Operation(name="norm_minus_inf"),
    ),
    "dtensor_convolution_of_planes, of a shard without places": (
        Leaf(shape=(1, 1, 1), placements=("S(2)",)),
        Operation(name="conv1d", arguments=(1, 1)),
    ),
    "dtensor_squeezes_local_tensor_alone, in quantile": (Leaf(shape=(2,), placements=("R",)), Operation(name="quantile")),
    "dtensor_index_add_of_cut_index, by its shape": (
        Leaf(shape=(1,), placements=("S(0)",)),
        Leaf(shape=(), placements=("R",)),
        Operation(name="lt", arguments=(2, 1)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES),
        Operation(name="index_add_own", arguments=(2, 1)),
    ),
    "dtensor_index_add_of_cut_index, in the backward": (
        Leaf(shape=(1,), placements=("S(0)",)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES),
        Operation(name="index_add_own", arguments=(2, 1)),
    ),
    "dtensor_index_add_of_cut_index, by ranks that wait": (
        Leaf(shape=(1, 1, 1), placements=("S(2)",)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES),
        Operation(name="index_add_own", arguments=(2, 1)),
        Redistribution(placements=("S(1)",)),
    ),
    "dtensor_writes_to_slices, after a redistribution": (
        Leaf(shape=(3,), placements=("R",)),
        Redistribution(placements=("S(0)",)),
        Operation(name="add_to_slice"),
    ),
    "dtensor_divides_integers, by index_put": (
        Leaf(shape=(1, 2), placements=("R", "S(0)")),
        Operation(name="count_nonzero_dim", dim=1),
        Constant(shape=(), placements=("R", "R"), contents=Contents.INDICES),
        Operation(name="index_put", arguments=(2, 1)),
    ),
    "dtensor_convolution_backward_of_planes, of no channels": (
        Leaf(shape=(2, 0, 1), placements=("S(0)",)),
        Operation(name="conv1d_padded", arguments=(1, 1)),
    ),
    "dtensor_solve_triangular_of_parts, in the backward": (
        Leaf(shape=(2, 2, 2), placements=("R", "R")),
        Leaf(shape=(2, 2, 2), placements=("S(1)", "S(0)"), seed=1),
        Operation(name="solve_triangular", arguments=(2, 1)),
    ),
    "dtensor_embedding_gathered_before_masked, as linear flattens it": (
        Leaf(shape=(2, 1), placements=("P(sum)",)),
        Constant(shape=(1, 2), placements=("R",), contents=Contents.INDICES, high=2),
        Operation(name="embedding_tied", arguments=(2, 1)),
    ),
    "dtensor_embedding_transposed_before_masked, of another shape": (
        Leaf(shape=(2, 1), placements=("S(0)",)),
        Constant(shape=(1, 2), placements=("R",), contents=Contents.INDICES, high=2),
        Operation(name="embedding_transposed", arguments=(2, 1)),
    ),
    "dtensor_in_place_of_partial, in an optimizer": (
        Leaf(shape=(2,), placements=("P(sum)",)),
        Leaf(shape=(2,), placements=("R",), seed=1),
        Operation(name="step_of_adam", arguments=(2, 1)),
    ),
    "dtensor_select_changes_its_input, in the backward": (
        Leaf(shape=(2,), placements=("R",)),
        Operation(name="stack", arguments=(1, 1)),
        Operation(name="square"),
    ),
    "dtensor_select_changes_its_input, in another operation on that input": (
        Leaf(shape=(1, 1), placements=("R",)),
        Operation(name="element"),
        Operation(name="logcumsumexp", arguments=(2,), dim=1),
    ),
    "dtensor_select_changes_its_input, in the tensor of which it is a redistribution": (
        Leaf(shape=(1,), placements=("R",)),
        Redistribution(placements=("R",)),
        Operation(name="element"),
        Redistribution(placements=("S(0)",), argument=3),
    ),
    "dtensor_gathers_gradient_of_local_strides, of other sizes": (
        Leaf(shape=(1, 2), placements=("S(0)",)),
        Leaf(shape=(1, 1), placements=("S(0)",), seed=1),
        RoundTrip(),
        Operation(name="where_scalar"),
    ),
    "dtensor_pad_on_several_axes, of what is replicated": (
        Leaf(shape=(1,), placements=("R", "R")),
        Operation(name="pad_last"),
        Redistribution(placements=("R", "S(0)")),
    ),
    "dtensor_reduction_of_partial, of maxima by a sum": (
        Leaf(shape=(2, 1), placements=("P(max)",)),
        Operation(name="einsum_sum"),
    ),
    "dtensor_reduction_of_partial, in the backward": (Leaf(shape=(4,), placements=("P(max)",)), Operation(name="var")),
    "dtensor_redistributes_to_other_reduction, to be joined": (
        Leaf(shape=(1, 1), placements=("S(0)",)),
        Leaf(shape=(1, 1), placements=("P(min)",)),
        Operation(name="cat_of_sums", arguments=(2, 1)),
    ),
    "dtensor_addends_plus_number, in a larger operation": (
        Leaf(shape=(), placements=("P(sum)",)),
        Operation(name="hypot", arguments=(1, 1)),
    ),
    "dtensor_masks_what_joins_rows, of a partial table": (
        Leaf(shape=(2, 1), placements=("P(sum)",)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES, high=2),
        Operation(name="embedding_stacked", arguments=(2, 1)),
    ),
    "dtensor_masks_rows_of_other_shape, of a partial table": (
        Leaf(shape=(2, 1), placements=("P(sum)",)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES, high=2),
        Operation(name="embedding_stacked", arguments=(2, 1)),
    ),
    "dtensor_convolution_backward_of_planes, of uneven rows without channels": (
        Leaf(shape=(5, 0, 1), placements=("S(0)",)),
        Operation(name="conv1d", arguments=(1, 1)),
    ),
    "dtensor_divides_integers, of booleans": (
        Leaf(shape=(2, 2), placements=("S(1)",)),
        Operation(name="lt", arguments=(1, 1)),
        Operation(name="flatten_to", arguments=(1,), dim=1),
        Constant(shape=(), placements=("R",), contents=Contents.ORDER, high=4),
        Operation(name="index_fill_tensor", arguments=(2, 1)),
    ),
    "dtensor_equal_of_other_shapes, of a scalar": (
        Leaf(shape=(1,), placements=("S(0)",)),
        Operation(name="kl_div_log_target", arguments=(1, 1)),
        Operation(name="equal", arguments=(1, 2)),
    ),
    "dtensor_index_put_of_shards, by indices that a rank lacks": (
        Leaf(shape=(1,), placements=("S(0)",)),
        Constant(shape=(1, 2), placements=("S(0)",), contents=Contents.INDICES),
        Operation(name="index_put_add", arguments=(2, 1)),
    ),
    "dtensor_split_of_no_elements, by unsafe_split": (Leaf(shape=(0,), placements=("R",)), Operation(name="split_unsafe")),
    "dtensor_view_of_gathered_part, of two vectors": (
        Leaf(shape=(2, 5), placements=("S(1)",)),
        Redistribution(placements=("R",)),
        Operation(name="cartesian", arguments=(1, 1)),
    ),
    "dtensor_solve_triangular_of_parts, of batches": (
        Leaf(shape=(4, 1, 1), placements=("R",)),
        Leaf(shape=(4, 1, 1), placements=("S(0)",), seed=1),
        Operation(name="solve_triangular", arguments=(2, 1)),
    ),
    "dtensor_convolution_of_planes, without batches": (
        Leaf(shape=(1, 1), placements=("S(0)",)),
        Leaf(shape=(1, 1, 1), placements=("R",), seed=1),
        Operation(name="conv1d_padded", arguments=(2, 1)),
    ),
    "dtensor_layer_norm_backward_of_sharded_weight, of a partial weight": (
        Leaf(shape=(2, 2), placements=("R",)),
        Leaf(shape=(2,), placements=("P(sum)",), seed=1),
        Operation(name="layer_norm_weight", arguments=(2, 1)),
    ),
    "dtensor_scatter_in_place_of_shards, of a partial tensor": (
        Leaf(shape=(2, 2), placements=("P(sum)",)),
        Constant(shape=(2, 2), placements=("R",), contents=Contents.INDICES, high=2),
        Operation(name="scatter_", arguments=(2, 1)),
    ),
    "dtensor_foreach_in_place_of_partial, in an optimizer": (
        Leaf(shape=(2,), placements=("P(sum)",)),
        Leaf(shape=(2,), placements=("R",), seed=1),
        Operation(name="step_of_asgd", arguments=(2, 1)),
    ),
    "dtensor_pad_on_several_axes, of what another axis shards": (
        Leaf(shape=(2,), placements=("S(0)", "R")),
        Operation(name="pad_both"),
    ),
    "dtensor_stack_along_negative_dim, of a result": (
        Leaf(shape=(2,), placements=("S(0)",)),
        Operation(name="stack_thrice", arguments=(1, 1), dim=-1),
    ),
    "dtensor_index_put_of_shards, silently": (
        Leaf(shape=(4,), placements=("S(0)",)),
        Constant(shape=(2,), placements=("R",), contents=Contents.INDICES, high=2, seed=2),
        Operation(name="index_put", arguments=(2, 1)),
    ),
    "dtensor_index_put_of_shards, by a dim that there is not": (
        Leaf(shape=(2,), placements=("R",)),
        Constant(shape=(2, 2), placements=("S(0)",), contents=Contents.INDICES, high=2),
        Operation(name="index_tensor", arguments=(2, 1)),
    ),
    "dtensor_layer_norm_backward_of_sharded_weight, of the bias": (
        Leaf(shape=(2, 2), placements=("R",)),
        Leaf(shape=(2,), placements=("R",), seed=1),
        Leaf(shape=(2,), placements=("S(0)",), seed=2),
        Operation(name="layer_norm_bias", arguments=(3, 2, 1)),
    ),
    "dtensor_convolution_of_planes, of a rank without rows of the weight": (
        Leaf(shape=(1, 1, 1), placements=("R",)),
        Leaf(shape=(1, 1, 3), placements=("S(0)",), seed=1),
        Operation(name="conv1d_padded", arguments=(2, 1)),
    ),
    "dtensor_convolution_backward_of_planes, of places": (
        Leaf(shape=(2, 4, 6), placements=("S(2)",)),
        Leaf(shape=(4, 4, 3), placements=("R",), seed=1),
        Operation(name="conv1d_padded", arguments=(2, 1)),
    ),
    "dtensor_writes_to_slices, of what DTensor has sharded": (
        Leaf(shape=(1, 4), placements=("P(sum)",)),
        Operation(name="sort", dim=-2, output=1),
        Operation(name="add_to_slice"),
    ),
    "dtensor_sum_of_norms, of distances": (
        Leaf(shape=(2, 2), placements=("S(1)",)),
        Leaf(shape=(2, 2), placements=("S(1)",), seed=1),
        Operation(name="pairwise_distance", arguments=(2, 1)),
        Operation(name="sum_dim", dim=-1),
    ),
    "dtensor_joins_norms_with_others, of distances": (
        Leaf(shape=(2, 2), placements=("S(1)",)),
        Leaf(shape=(2, 2), placements=("S(1)",), seed=1),
        Operation(name="pairwise_distance", arguments=(2, 1)),
        Leaf(shape=(2,), placements=("R",)),
        Operation(name="cat", arguments=(2, 1)),
    ),
    "dtensor_mean_losses, of what DTensor has sharded": (
        Leaf(shape=(1, 4), placements=("P(sum)",)),
        Operation(name="sort", dim=-2, output=1),
        Leaf(shape=(1, 4), placements=("R",), seed=1),
        Operation(name="smooth_l1_loss_mean", arguments=(2, 1)),
    ),
    "dtensor_random_of_parts, of what DTensor has sharded": (
        Leaf(shape=(1, 4), placements=("P(sum)",)),
        Operation(name="sort", dim=-2, output=1),
        Operation(name="seeded_randint_like"),
    ),
    "dtensor_out_of_addends, of no elements": (
        Leaf(shape=(0, 3), placements=("S(0)",)),
        Leaf(shape=(0, 3), placements=("R",), seed=1),
        Operation(name="add_out", arguments=(2, 1)),
    ),
    "dtensor_slice_backward, of differences": (
        Leaf(shape=(3,), placements=("R",)),
        Operation(name="diff", dim=-1),
        Leaf(shape=(2,), placements=("S(0)",)),
        Operation(name="mul", arguments=(2, 1)),
    ),
    "dtensor_slice_backward, of uneven shards": (
        Leaf(shape=(4,), placements=("R",)),
        Operation(name="diff", dim=-1),
        Leaf(shape=(3,), placements=("S(0)",)),
        Operation(name="mul", arguments=(2, 1)),
    ),
    "dtensor_divides_integers, where dtypes must agree": (
        Leaf(shape=(1, 2), placements=("S(1)",)),
        Operation(name="count_nonzero_dim", dim=1),
        Constant(shape=(1,), placements=("R",), contents=Contents.INDICES),
        Operation(name="index_add_own", arguments=(2, 1)),
    ),
    "dtensor_fill_addends, as an initialization does": (Leaf(shape=(), placements=("P(sum)",)), Operation(name="init_constant")),
}
"""Programs that show an entry in another way than its own program."""
SINCE = {
    "dtensor_divides_integers, of booleans": ">=2.12",
    "dtensor_convolution_of_planes, of kernels of which a rank has none": ">=2.12",
    "dtensor_masks_rows_of_other_shape, of a partial table": ">=2.14",
    "dtensor_masks_what_joins_rows, of a partial table": "<2.14",
    "dtensor_equal_of_other_shapes, of a scalar": "<2.11",
    "dtensor_index_put_of_shards, by indices that a rank lacks": "<2.12",
    "dtensor_split_of_no_elements, by unsafe_split": "<2.13",
    "dtensor_view_of_uneven_parts, of partials that are scattered over a dim which another axis shards": ">=2.12,<2.14",
    "dtensor_divides_integers, where dtypes must agree": ">=2.12,<2.14",
    "dtensor_sum_of_norms, of distances": ">=2.11,<2.14",
    "dtensor_joins_norms_with_others, of distances": ">=2.11,<2.14",
    "dtensor_writes_to_slices, of what DTensor has sharded": "<2.14",
    "dtensor_mean_losses, of what DTensor has sharded": ">=2.11,<2.14",
    "dtensor_random_of_parts, of what DTensor has sharded": "<2.14",
    "dtensor_divides_integers, by index_put": ">=2.12",
    "dtensor_foreach_norm_of_nothing, of maxima": ">=2.13",
    "dtensor_bits_of_addends, as a copy shows": ">=2.11,<2.14",
    "dtensor_convolution_backward_of_planes, of places": ">=2.10,<2.12",
    "dtensor_convolution_of_planes, of a shard without places": ">=2.12",
}
"""Programs that show the entry in fewer versions. Before 2.14 sort() shards partial tensors. Since 2.11 the norm of distances
has a rule; before, each tensor in the list gets the maximum of one, or a norm is not partial. Since 2.12 convolutions with
sharded positions have a wrong size; before, they are refused without padding."""


@pytest.mark.parametrize("name", ALSO)
def test_an_entry_is_known_in_each_of_its_ways(name: str) -> None:
    """Values, errors, or the stack of a rank that never ends identify it. Entries never match programs without the error."""
    known = name.partition(",")[0]
    leaf, *rest = ALSO[name]
    verdict = check_program(program(leaf, *rest, mesh=(2,) * len(leaf.placements)), deadline=1.0)
    versions = SINCE.get(name) or next(each for each in ON_FILE if each.id == known).torch
    assert (verdict.known == known) == is_torch_in(versions), verdict.describe()


@pytest.mark.parametrize(("name", "shape", "size"), [("batch_norm", (2, 4), 3), ("interpolate", (1, 5, 1), 4)])
def test_what_has_no_channels_on_a_rank_is_known_as_pools_are(name: str, shape: tuple[int, ...], size: int) -> None:
    """The last rank's error identifies it, because all others have channels."""
    found = check_program(program(Leaf(shape=shape, placements=("S(1)",)), Operation(name=name), mesh=(size,)), deadline=1.0)
    assert found.known == ("dtensor_pool_of_empty_shard" if is_torch_in(">=2.12") else "")


def test_a_view_on_axes_of_one_rank_is_known_in_any_operation() -> None:
    """The function that raises identifies it."""
    leaves = (Leaf(shape=(2, 2, 1), placements=("S(1)", "R")), Leaf(shape=(1,), placements=("R", "P(avg)")))
    verdict = check_program(program(*leaves, Operation(name="mv", arguments=(2, 1)), mesh=(1, 1)))
    assert (verdict.known == "dtensor_unflattens_for_axis_of_one_rank") == is_torch_in(">=2.12"), verdict.describe()


def test_an_error_that_is_not_on_file_is_a_finding() -> None:
    """An operation without an entry raises the error of another entry."""
    known = next(each for each in ON_FILE if each.id == "dtensor_logsumexp_of_scalar")
    scalar = SMALLEST_PROGRAMS[known.id]
    verdict = check_program(scalar)
    other = program(Leaf(shape=(), placements=("R",)), Operation(name="exp"), mesh=(1,))
    assert not known.could_show(other)
    assert known.explains(scalar, verdict) == is_torch_in(known.torch)
    assert not known.explains(other, verdict)


@pytest.mark.parametrize(
    ("name", "shape", "placement", "size"),
    [("flatten", (2, 2), "S(1)", 2), ("flatten", (3, 2), "S(0)", 2), ("view_split_2", (4,), "S(0)", 4)],
)
def test_a_view_that_torch_refuses_is_no_finding(name: str, shape: tuple[int, ...], placement: str, size: int) -> None:
    """Each torch version has its own words for it."""
    leaf = Leaf(shape=shape, placements=(placement,))
    assert check_program(program(leaf, Operation(name=name), mesh=(size,))).outcome is Outcome.EQUIVALENT


def test_a_value_that_is_not_computed_from_a_wrong_result_is_a_finding() -> None:
    """any() leaves partial booleans, so that later sums are wrong. Itself it is right, and so are other values."""
    known = next(each for each in ON_FILE if each.id == "dtensor_any_counts_ranks")
    found = program(
        Leaf(shape=(4,), placements=("S(0)",)),
        Operation(name="any_dim"),
        Operation(name="sum"),
        Operation(name="exp"),
        Operation(name="sum", arguments=(4,)),
    )
    expected = {1: False, 2: True, 3: True, 4: False}
    for number, is_known in expected.items():
        divergence = Divergence(step=0, phase=Phase.VALUE, tensor=f"v{number} sum", difference=Difference.VALUE, rank=0)
        verdict = ProgramVerdict(outcome=Outcome.DIVERGED, world="sim", program=found, divergence=divergence)
        assert known.explains(found, verdict) == (is_known and is_torch_in(known.torch))


def test_a_gradient_that_no_wrong_result_reaches_is_a_finding() -> None:
    """any() leaves partial booleans. Gradients are wrong for values that are combined with them, not for other values."""
    known = next(each for each in ON_FILE if each.id == "dtensor_any_counts_ranks")
    found = program(
        Leaf(shape=(4,), placements=("S(0)",)),
        Operation(name="any_dim"),
        Leaf(shape=(), placements=("R",)),
        Operation(name="mul", arguments=(1, 2)),
        Leaf(shape=(4,), placements=("S(0)",), seed=1),
        Operation(name="cumsum"),
    )
    for number, is_known in {2: True, 3: True, 4: False, 5: False}.items():
        divergence = Divergence(step=0, phase=Phase.GRADIENT, tensor=f"v{number} into mul", difference=Difference.VALUE, rank=0)
        verdict = ProgramVerdict(outcome=Outcome.DIVERGED, world="sim", program=found, divergence=divergence)
        assert known.explains(found, verdict) == (is_known and is_torch_in(known.torch))


def test_a_convolution_of_boolean_values_is_refused_also_without_values() -> None:
    """Plain torch accepts booleans if the input has no channels, because it computes nothing. torch 2.9 has other faults."""
    no_channels = program(
        Leaf(shape=(0, 1, 1), placements=("R",)),
        Operation(name="logical_not"),
        Leaf(shape=(1, 0, 1, 1), placements=("R",)),
        Operation(name="conv2d_dilated", arguments=(2, 1)),
        mesh=(1,),
    )
    verdict = check_program(no_channels)
    assert (verdict.outcome is Outcome.EQUIVALENT) == is_torch_in(">=2.10"), verdict.describe()
    assert verdict.refusals or not is_torch_in(">=2.10")
