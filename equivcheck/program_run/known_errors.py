"""Errors of DTensor in tensor programs that do not say what is not supported, where one device computes something."""

from __future__ import annotations

from equivcheck.program_run.known import KnownDifference

_OF_EXTREMES = (
    *("max_all", "min_all", "amax_all", "argmax_all", "median_all", "max_dim", "min_keepdim", "amax", "amin_keepdim"),
    *("argmax", "argmin_keepdim", "median", "amax_dims", "norm_inf", "norm_dim_inf"),
)
_OF_VIEWS = (
    *("view_own", "reshape_own", "flatten", "reshape_flat", "view_flat", "view_ones", "ravel_transposed", "flatten_to"),
    *("flatten_from", "unflatten_pairs", "unflatten_threes", "view_split_2", "view_split_3", "reshape_split_4"),
    *("reshape_minus_2", "reshape_3d", "reshape_heads", "view_as_other", "linear", "linear_bias", "matmul_batches"),
    *("matmul_shared", "einsum_ij_jk", "einsum_ij_kj", "einsum_bij", "einsum_ij_j", "einsum_trace", "einsum_sum"),
)
_WRONG_SIZE = r"shape '\[.*\]' is invalid for input of size"

KNOWN_ERRORS = (
    KnownDifference(
        id="dtensor_extreme_of_empty_shard",
        link="no report found: a maximum, minimum or infinity norm over a cut dim raises on ranks whose shard has no elements, "
        "while the others wait for them",
        torch=">=2.12",
        operations=_OF_EXTREMES,
        facts=frozenset({"cut"}),
        raises=r"Expected reduction dim .*(to have non-zero size|to be specified)|cannot compute the inf norm",
    ),
    KnownDifference(
        id="dtensor_position_of_extreme",
        link="no report found: argmax and argmin along a cut dim put the parts of ranks together in the wrong shape",
        torch=">=2.12",
        operations=("argmax", "argmin_keepdim"),
        facts=frozenset({"cut"}),
        raises=_WRONG_SIZE,
    ),
    KnownDifference(
        id="dtensor_view_of_uneven_parts",
        link="no report found: views of a dim that several axes cut, or an uneven one, take sizes that are not the rank's",
        torch=">=2.12",
        operations=_OF_VIEWS,
        facts=frozenset({"cut"}),
        raises=_WRONG_SIZE,
    ),
    KnownDifference(
        id="dtensor_endless_view",
        link="no report found: view_groups() never ends, or divides by zero, for shapes without elements",
        torch=">=2.12",
        operations=_OF_VIEWS,
        facts=frozenset({"no elements"}),
        raises=r"in view_groups|integer modulo by zero",
    ),
    KnownDifference(
        id="dtensor_transpose_of_scalar",
        link="no report found: transpose(0, -1) of a tensor without dims raises",
        torch=">=2.12",
        operations=("transpose_contiguous", "swapaxes", "ravel_transposed"),
        facts=frozenset(),
        raises=r"Expected dim1 < ndim, got 0 >= 0",
    ),
    KnownDifference(
        id="dtensor_logsumexp_of_scalar",
        link="no report found: logsumexp of a tensor without dims raises",
        torch=">=2.12,<2.14",
        operations=("logsumexp", "logsumexp_all"),
        facts=frozenset(),
        raises=r"Expected reduce_dims to not be None",
    ),
    KnownDifference(
        id="dtensor_split_of_no_elements",
        link="no report found: split of a dim of size 0 has no output where one device has one",
        torch=">=2.12",
        operations=("split",),
        facts=frozenset({"no elements"}),
        raises=r"`output_specs` has 0 outputs|list assignment index out of range|Strategy length 1 != expected 2",
    ),
    KnownDifference(
        id="dtensor_group_norm_of_no_elements",
        link="no report found: the backward of group_norm divides by zero where there are no elements",
        torch=">=2.13",
        operations=("group_norm", "group_norm_weight"),
        facts=frozenset({"no elements"}),
        raises=r"float division by zero|Expected number of channels to be greater than 0",
    ),
    KnownDifference(
        id="dtensor_vector_times_no_rows",
        link="no report found: the backward of a vector times a matrix without rows takes strides of other dims",
        torch=">=2.13,<2.14",
        operations=("vecmat",),
        facts=frozenset({"no elements"}),
        raises=r"dimensionality of sizes \(\d+\) must match dimensionality of strides",
    ),
    KnownDifference(
        id="dtensor_index_add_backward",
        link="no report found: the backward of index_add_ along a cut dim looks full indices up in the shard",
        torch=">=2.13",
        operations=("index_add_own",),
        facts=frozenset({"cut"}),
        raises=r"index out of range in self",
    ),
    KnownDifference(
        id="dtensor_bits_of_mean",
        link="no report found: view(dtype) of addends of a mean takes the bits of each, which are no numbers to average",
        torch=">=2.12",
        operations=("real_view",),
        facts=frozenset(),
        raises=r"all_reduce\.avg does not take|can't be cast to the desired output type",
    ),
)
"""Met by campaigns on torch 2.13; a script of torch alone showed each over gloo ranks on 2.13, and was tried on 2.12 and 2.14."""
