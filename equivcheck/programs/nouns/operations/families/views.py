"""Views and reshapes."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import CUBES, MATRICES, operations

FLAT = ((24,), (12,), (6,))
CUT = ((4, 6), (5, 6), (1, 6), (6, 4))

VIEWS = (
    *operations(
        {
            "t": "a.t()",
            "transpose": "a.transpose(0, 1)",
            "transpose_last": "a.transpose(-1, -2)",
            "transpose_contiguous": "a.transpose(0, -1).contiguous()",
            "permute": "a.permute(*reversed(range(a.ndim)))",
            "movedim": "a.movedim(0, -1)",
            "swapaxes": "a.swapaxes(-2, -1)",
            "mT": "a.mT",
            "squeeze": "a.squeeze()",
            "expand_more": "a.expand(2, *a.shape)",
            "expand_first": "a[:1].expand(3, *a.shape[1:])",
            "view_own": "a.view(a.shape)",
            "reshape_own": "a.reshape(a.shape)",
            "flatten": "a.flatten()",
            "reshape_flat": "a.reshape(-1)",
            "view_flat": "a.view(-1)",
            "view_ones": "a.view(1, *a.shape, 1)",
            "ravel_transposed": "a.transpose(0, -1).reshape(-1)",
            "repeat": "a.repeat(2, *([1] * (a.ndim - 1)))",
            "repeat_last": "a.repeat(*([1] * (a.ndim - 1)), 2)",
            "tile": "a.tile(2)",
            "atleast_3d": "torch.atleast_3d(a)",
        },
        shapes=((4,), *MATRICES, *CUBES, (2, 1, 3)),
    ),
    *operations(
        {
            "unsqueeze": "a.unsqueeze(dim)",
            "squeeze_dim": "a.squeeze(dim)",
            "repeat_interleave": "a.repeat_interleave(2, dim)",
            "flatten_to": "a.flatten(0, dim)",
            "flatten_from": "a.flatten(dim)",
            "unflatten_pairs": "a.unflatten(dim, (-1, 2))",
            "unflatten_threes": "a.unflatten(dim, (3, -1))",
            "tril": "a.tril(dim)",
            "triu": "a.triu(dim)",
        },
        takes_dim=True,
        shapes=((4,), *CUT, *CUBES),
    ),
    *operations(
        {
            "view_split_2": "a.view(2, -1)",
            "view_split_3": "a.view(3, -1)",
            "reshape_split_4": "a.reshape(4, -1)",
            "reshape_minus_2": "a.reshape(-1, 2)",
            "reshape_3d": "a.reshape(2, 3, -1)",
            "reshape_heads": "a.reshape(a.shape[0], 2, -1).transpose(0, 1)",
            "view_as_other": "a.t().reshape(a.shape)",
        },
        shapes=(*FLAT, *CUT, *CUBES),
    ),
    *operations(
        {
            "unfold": "a.unfold(dim, 2, 1)",
            "unfold_steps": "a.unfold(dim, 2, 2)",
            "diagonal": "a.diagonal(dim)",
        },
        takes_dim=True,
        shapes=((4, 6), (5, 3), (4, 4)),
    ),
    *operations(
        {
            # A copy, because as_strided reads the base's elements around a view.
            "as_strided": "a.clone(memory_format=torch.contiguous_format).as_strided((2, 2), (1, 1))",
            "diag": "torch.diag(a)",
            "diag_embed": "torch.diag_embed(a)",
            "real_view": "a.view(torch.int64)",
        },
        shapes=((4,), (5,), (4, 6), (4, 4)),
    ),
)
