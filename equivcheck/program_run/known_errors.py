"""Errors of DTensor in tensor programs that do not say what is not supported, where one device computes something."""

from __future__ import annotations

from equivcheck.program_run.known import CONVOLUTIONS, KnownDifference

_OF_EXTREMES = (
    *("max_all", "min_all", "amax_all", "argmax_all", "median_all", "max_dim", "min_keepdim", "amax", "amin_keepdim"),
    *("argmax", "argmin_keepdim", "median", "amax_dims", "norm_inf", "norm_minus_inf", "norm_dim_inf"),
)
_OF_VIEWS = (
    *("view_own", "reshape_own", "flatten", "reshape_flat", "view_flat", "view_ones", "ravel_transposed", "flatten_to"),
    *("flatten_from", "unflatten_pairs", "unflatten_threes", "view_split_2", "view_split_3", "reshape_split_4"),
    *("reshape_minus_2", "reshape_3d", "reshape_heads", "view_as_other", "linear", "linear_bias", "matmul_batches"),
    *("repeat", "repeat_last", "tile", "matmul_shared", "einsum_ij_jk", "einsum_ij_kj", "einsum_bij", "einsum_ij_j"),
    *("einsum_trace", "einsum_sum"),
)
_WRONG_SIZE = r"shape '\[.*\]' is invalid for input of size"

KNOWN_ERRORS = (
    KnownDifference(
        id="dtensor_extreme_of_empty_shard",
        link="no report found: a maximum, minimum or infinity norm over a cut dim raises on ranks whose shard has no elements, "
        "while the others wait for them",
        torch=">=2.9",
        operations=_OF_EXTREMES,
        facts=frozenset(),
        any_of=frozenset({"empty shard", "dim cut twice", "no elements"}),
        raises=r"Expected reduction dim .*(to have non-zero size|to be specified)|cannot compute the -?inf norm",
    ),
    KnownDifference(
        id="dtensor_position_of_extreme",
        link="no report found: argmax and argmin along a cut dim put the parts of ranks together in the wrong shape",
        torch=">=2.11,<2.15",
        operations=("argmax", "argmin_keepdim"),
        facts=frozenset({"cut"}),
        raises=_WRONG_SIZE,
    ),
    KnownDifference(
        id="dtensor_view_of_uneven_parts",
        link="https://github.com/pytorch/pytorch/issues/143372 (of uneven dims): views of a dim that several axes cut, or an "
        "uneven one, take sizes that are not the rank's",
        torch=">=2.9",
        operations=_OF_VIEWS,
        facts=frozenset({"cut"}),
        any_of=frozenset({"uneven", "dim cut twice"}),
        raises=_WRONG_SIZE,
    ),
    KnownDifference(
        id="dtensor_endless_view",
        link="no report found: view_groups() never ends, or divides by zero, for shapes without elements",
        torch=">=2.9",
        operations=(*_OF_VIEWS, "prod"),
        facts=frozenset({"no elements"}),
        raises=r"in view_groups|integer modulo by zero",
    ),
    KnownDifference(
        id="dtensor_transpose_of_scalar",
        link="no report found: transpose(0, -1) of a tensor without dims raises",
        torch=">=2.11",
        operations=("transpose_contiguous", "swapaxes", "ravel_transposed"),
        facts=frozenset(),
        raises=r"Expected dim1 < ndim, got 0 >= 0",
    ),
    KnownDifference(
        id="dtensor_logsumexp_of_scalar",
        link="no report found: logsumexp of a tensor without dims raises",
        torch=">=2.10,<2.14",
        operations=("logsumexp", "logsumexp_all"),
        facts=frozenset(),
        raises=r"Expected reduce_dims to not be None",
    ),
    KnownDifference(
        id="dtensor_split_of_no_elements",
        link="no report found: split of a dim of size 0 has no output where one device has one",
        torch=">=2.9",
        operations=("split", "split_rows", "split_first", "split_sizes", "split_unsafe"),
        facts=frozenset({"no elements"}),
        raises=r"aten\.split",
    ),
    KnownDifference(
        id="dtensor_group_norm_of_no_elements",
        link="no report found: the backward of group_norm divides by zero where there are no elements",
        torch=">=2.13,<2.14",
        operations=("group_norm", "group_norm_weight"),
        facts=frozenset({"no elements"}),
        raises=r"float division by zero",
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
        id="dtensor_index_add_of_cut_index",
        link="no report found: index_add_ by an index that is cut gives what cannot be read",
        torch=">=2.13",
        operations=("index_add_own",),
        facts=frozenset({"cut"}),
        raises=r"narrow unexpectedly changed",
    ),
    KnownDifference(
        id="dtensor_unsafe_split_into_one",
        link="no report found: unsafe_split into one part raises that one output is not one",
        torch=">=2.12,<2.14",
        operations=("split_unsafe",),
        facts=frozenset(),
        raises=r"`output_specs` has 1 output which does not equal the number of op outputs: 1",
    ),
    KnownDifference(
        id="dtensor_eye_of_rows",
        link="no report found (since https://github.com/pytorch/pytorch/pull/173489): torch.eye(out=), and nn.init.eye_ with "
        "it, makes the whole matrix of each shard, and takes what was found out for the first tensor for all others",
        torch=">=2.12,<2.14",
        operations=("init_eye",),
        facts=frozenset({"not replicated"}),
        raises=r"narrow unexpectedly changed|Expected cond to be True",
    ),
    KnownDifference(
        id="dtensor_bits_of_mean",
        link="no report found: view(dtype) of addends of a mean takes the bits of each, which are no numbers to average",
        torch=">=2.9",
        operations=("real_view",),
        facts=frozenset(),
        raises=r"all_reduce\.avg does not take|can't be cast to the desired output type",
    ),
    KnownDifference(
        id="dtensor_convolution_of_planes",
        link="https://github.com/pytorch/pytorch/pull/186129 (depthwise): convolutions of parts have channels, groups or "
        "kernels that the shards have not, and raise",
        torch=">=2.13",
        operations=CONVOLUTIONS,
        facts=frozenset({"cut"}),
        raises=r"Given (groups|transposed)=\d+, |Kernel size can't be greater than actual input size",
    ),
    KnownDifference(
        id="dtensor_convolution_says_other_size",
        link="https://github.com/pytorch/pytorch/pull/186129 (depthwise): the result of a convolution of a cut weight says "
        "another size than its shards have, and cannot be read",
        torch=">=2.12",
        operations=CONVOLUTIONS,
        facts=frozenset({"cut"}),
        raises=r"narrow unexpectedly changed|collectives do not match: .* issued all_gather",
    ),
    KnownDifference(
        id="dtensor_convolution_backward_of_planes",
        link="https://github.com/pytorch/pytorch/issues/191926: the backward of convolutions takes gradients of an input that "
        "is not cut along rows for parts of other sizes",
        torch=">=2.12",
        operations=CONVOLUTIONS,
        facts=frozenset({"cut"}),
        raises=r"Expected a tensor of dimension \d+ and tensor\.size|backward: IndexError: tuple index out of range",
    ),
    KnownDifference(
        id="dtensor_foreach_norm_of_nothing",
        link="https://github.com/pytorch/pytorch/pull/173238: foreach norms of infinity, and maxima, raise on the ranks whose "
        "shard is empty",
        torch=">=2.9",
        operations=("foreach_norm_inf", "foreach_max", "total_norm_inf"),
        facts=frozenset({"not replicated"}),
        raises=r"on an empty tensor|of an empty tensor",
    ),
    KnownDifference(
        id="dtensor_solve_triangular_of_parts",
        link="no report found: solve_triangular of cut matrices raises about sizes of shards",
        torch=">=2.12",
        operations=("solve_triangular",),
        facts=frozenset({"cut"}),
        raises=r"narrow unexpectedly changed|Incompatible shapes|incompatible",
    ),
    KnownDifference(
        id="dtensor_shuffles_parts",
        link="no report found: shuffles of channels or places ask shards for sizes that the whole has",
        torch=">=2.12",
        operations=("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
        facts=frozenset({"cut"}),
        raises=r"divisible by",
    ),
    KnownDifference(
        id="dtensor_masked_by_other_shapes",
        link="no report found (of integers: https://github.com/pytorch/pytorch/issues/172350): an index that is a mask is held "
        "against the shape of the shard",
        torch=">=2.12,<2.15",
        operations=("assign_masked", "embedding_tied", "index_mask"),
        facts=frozenset({"cut"}),
        raises=r"shape of the mask",
    ),
    KnownDifference(
        id="dtensor_mean_of_no_dims",
        link="no report found: mean((), keepdim=True) keeps a cut dim of one element as cut, and raises in the backward",
        torch=">=2.9",
        operations=("mean_of_nothing_kept",),
        facts=frozenset({"cut"}),
        raises=r"aten\.expand",
    ),
    KnownDifference(
        id="dtensor_expands_one_row",
        link="no report found (of a dim that is kept: https://github.com/pytorch/pytorch/issues/160968): expand() of a cut dim "
        "of one element to more raises",
        torch=">=2.9",
        operations=("expand_first", "expand_more", "index_add_own"),
        facts=frozenset({"dim of one element cut"}),
        raises=r"Sharding propagation failed for aten\.expand",
    ),
    KnownDifference(
        id="dtensor_squeezes_local_tensor_alone",
        link="no report found (the other way round: https://github.com/pytorch/pytorch/issues/174136): squeeze_() squeezes the "
        "local tensor and not the DTensor, so that a vector times a matrix has a dim too many",
        torch=">=2.13",
        operations=("vecmat", "matmul_shared", "linear", "mm_transposed", "quantile"),
        facts=frozenset(),
        raises=r"a DTensor of shape .* has shape .* in full_tensor\(\)",
    ),
)
"""Met by campaigns on torch 2.13; a script of torch alone showed each over gloo ranks."""
