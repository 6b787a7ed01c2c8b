"""Indexing: slices, index tensors, gather and scatter, embedding."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import (
    CUBES,
    MATRICES,
    Argument,
    ArgumentKind,
    Shape,
    first_shape,
    operations,
    row,
    size_along,
)

SHAPES: tuple[Shape, ...] = ((4,), (4, 6), (5, 3), (1, 4), CUBES[0])


def _three(_shape: Shape, _dim: int) -> Shape:
    return (3,)


def _two_along(shape: Shape, dim: int) -> Shape:
    shape[dim]  # raises IndexError if there is no such dim
    return (*shape[:dim], 2, *shape[dim % len(shape) + 1 :])


def _rows(shape: Shape, _dim: int) -> int:
    return size_along(shape, 0)


def _own_indices(shape: Shape, _dim: int) -> Shape:
    return (3, 2) if len(shape) > 1 else (3,)


INDICES = Argument(shapes=(_three,), kind=ArgumentKind.INDICES, high=size_along)
ORDER = Argument(shapes=(lambda _shape, _dim: (2,),), kind=ArgumentKind.ORDER, high=size_along)
ALONG = Argument(shapes=(_two_along,), kind=ArgumentKind.INDICES, high=size_along)

INDEXING = (
    *operations(
        {
            "first": "a[0]",
            "last_index": "a[-1]",
            "slice_start": "a[1:]",
            "slice_end": "a[:-1]",
            "slice_step": "a[::2]",
            "slice_last": "a[..., 1:]",
            "slice_nothing": "a[:0]",
            "none_index": "a[None]",
            "element": "a[..., 0]",
            "slice_both": "a[1:, :2]",
            "list_index": "a[[0, 1]]",
            "list_index_last": "a[..., [1, 0, 1]]",
            "nonzero": "F.relu(a).nonzero()",
            "unbind_second": "a.unbind(0)[1]",
            "iterate": "torch.stack([each * 2 for each in a])",
            "item": "a.sum().item()",
            "tolist": "torch.tensor(a.tolist())",
            "slice_negative": "a[-2:]",
            "slice_step_last": "a[..., ::2]",
            "index_pair": "a[[0, 1], [1, 0]]",
            "index_list_slice": "a[[1, 0], 1:]",
            "index_bool_list": "a[[True] + [False] * (a.shape[0] - 1)]",
            "take": "a.take(torch.tensor([0, 1]).expand(2, 2))",
            "argwhere": "torch.argwhere(a > 0)",
            "unique": "torch.unique(a.detach())",
            "split_rows": "first, *_ = a.split(1)\nfirst * 2",
        },
        shapes=(*SHAPES, (0, 3)),
    ),
    *operations(
        {
            "select": "a.select(dim, 0)",
            "select_last": "a.select(dim, -1)",
            "narrow": "a.narrow(dim, 1, 2)",
            "narrow_start": "a.narrow(dim, 0, 1)",
        },
        takes_dim=True,
        shapes=SHAPES,
    ),
    *operations(
        {
            "index_select": "a.index_select(dim, b)",
            "index_add_own": "a.clone().index_add_(dim, b, a.narrow(dim, 0, 1).expand_as(a.index_select(dim, b)))",
            "take_along": "before = dim % a.ndim\n"
            "torch.take_along_dim(a, b.view(*([1] * before), -1, *([1] * (a.ndim - before - 1))), dim)",
        },
        takes_dim=True,
        arguments=(INDICES,),
        shapes=SHAPES,
    ),
    *operations(
        {"index_fill": "a.index_fill(dim, b, 0.5)"},
        takes_dim=True,
        arguments=(ORDER,),
        shapes=SHAPES,
    ),
    *operations(
        {"gather": "a.gather(dim, b)", "scatter_add": "a.scatter_add(dim, b, torch.ones_like(b, dtype=a.dtype))"},
        takes_dim=True,
        arguments=(ALONG,),
        shapes=SHAPES,
    ),
    *operations(
        {"scatter_value": "a.scatter(dim, b, 0.5)"},
        takes_dim=True,
        arguments=(ALONG,),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *operations(
        {
            "index_tensor": "a[b]",
            "index_put": "a.index_put((b,), torch.ones_like(a[b]))",
            "index_put_add": "a.index_put((b,), a[b], accumulate=True)",
            "index_last": "a[..., b % a.shape[-1]]",
            "embedding": "F.embedding(b, a)",
        },
        arguments=(Argument(shapes=(_own_indices,), kind=ArgumentKind.INDICES, high=_rows),),
        shapes=((4, 6), (5, 3), (1, 4), CUBES[0]),
    ),
    *operations(
        {"embedding_transposed": "F.embedding(b, a).transpose(0, 1)"},
        arguments=(Argument(shapes=(lambda _shape, _dim: (2, 2),), kind=ArgumentKind.INDICES, high=_rows),),
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {"embedding_padded": "F.embedding(b, a, padding_idx=0)", "embedding_bag": "F.embedding_bag(b, a, mode='sum')"},
        arguments=(Argument(shapes=(lambda _shape, _dim: (4, 3),), kind=ArgumentKind.INDICES, high=_rows),),
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {
            "index_fill_": "a.clone().index_fill_(dim, b, 0.5)",
            "index_fill_tensor": "a.index_fill(dim, b, a.detach().sum())",
            "index_copy": "a.index_copy(dim, b, 2 * a.index_select(dim, b))",
            "index_reduce": "a.detach().index_reduce(dim, b, a.detach().index_select(dim, b), 'amax')",
        },
        takes_dim=True,
        arguments=(ORDER,),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *operations(
        {
            "scatter_src": "a.scatter(dim, b, torch.ones_like(b, dtype=a.dtype))",
            "scatter_": "a.clone().scatter_(dim, b, 0.5)",
            "scatter_add_own": "a.scatter_add(dim, b, a.gather(dim, b))",
            "scatter_reduce": "a.detach().scatter_reduce(dim, b, a.detach().gather(dim, b), 'amax')",
            "scatter_reduce_sum": "a.scatter_reduce(dim, b, a.gather(dim, b), 'sum')",
            "gather_of_sum": "a.sum(dim, keepdim=True).expand_as(a).gather(dim, b)",
        },
        takes_dim=True,
        arguments=(ALONG,),
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {
            "index_put_": "a.clone().index_put_((b,), a.detach()[b] * 2, accumulate=True)",
            "index_both": "a[b, b % a.shape[1]]",
            "embedding_scaled": "F.embedding(b, a, scale_grad_by_freq=True)",
            "embedding_max_norm": "F.embedding(b, a.detach().clone(), max_norm=1.0)",
            "embedding_tied": "F.linear(F.embedding(b, a), a)",
            "embedding_flat": "F.embedding(b, a).flatten(0, -2)",
            "embedding_stacked": "found = F.embedding(b, a)\ntorch.stack([found, torch.ones_like(found)])",
            "bincount": "torch.bincount(b.flatten(), minlength=9)",
        },
        arguments=(Argument(shapes=(_own_indices,), kind=ArgumentKind.INDICES, high=_rows),),
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {"masked_select": "a.masked_select(b)", "index_mask": "a[b]", "masked_scatter": "a.masked_scatter(b, a * 2)"},
        arguments=(Argument(shapes=(first_shape,), kind=ArgumentKind.MASK),),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *operations(
        {
            "one_hot": "F.one_hot(b, 6) + a.sum()",
            "searchsorted": "torch.searchsorted(a.flatten().sort()[0], b.double() / 3)",
            "bucketize": "torch.bucketize(a.detach(), b.double().sort()[0] - 1.5)",
            "position_ids": "b.cumsum(0) + a.shape[0]",
            "scaled_by_targets": "a * b[0]",
        },
        arguments=(INDICES,),
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {
            "assign_first": "out = a.clone()\nout[0] = 0.5\nout",
            "assign_slice": "out = a.clone()\nout[1:] = a[:-1]\nout",
            "assign_column": "out = a.clone()\nout[..., 0] = a[..., -1]\nout",
            "fill_slice": "out = a.clone()\nout[..., 1:].zero_()\nout",
            "mul_slice": "out = a.clone()\nout[1:].mul_(2)\nout",
            "add_to_slice": "out = a.clone()\nout[..., :2] += 1\nout",
            "assign_step": "out = a.clone()\nout[::2] = 0.5\nout",
            "assign_masked": "out = a.clone()\nout[out > 0] = 0.5\nout",
            "assign_index": "out = a.clone()\nout[[0, 1]] = a[[1, 0]]\nout",
            "copy_to_view": "out = a.clone()\nout.view(-1)[1:].copy_(a.flatten()[:-1])\nout",
            "zero_last": "out = a.clone()\nout[-1].zero_()\nout",
            "fill_transposed": "out = a.clone()\nout.transpose(0, -1)[0].fill_(0.5)\nout",
            "select_scatter": "torch.select_scatter(a, torch.zeros_like(a[0]), 0, 1)",
        },
        shapes=(*MATRICES[:3], (4,), CUBES[0]),
    ),
    *operations(
        {"assign_row": "out = a.clone()\nout[:1] = b\nout", "slice_scatter": "torch.slice_scatter(a, b, 0, 0, 1)"},
        arguments=(Argument(shapes=(row,)),),
        shapes=MATRICES[:3],
    ),
)
