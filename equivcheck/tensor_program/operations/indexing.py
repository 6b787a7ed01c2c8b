"""Indexing: slices, index tensors, gather and scatter, embedding."""

from __future__ import annotations

from equivcheck.tensor_program.operations.operation import (
    CUBES,
    MATRICES,
    Argument,
    Kind,
    Shape,
    facts,
    row,
    same,
    size_along,
)

SHAPES: tuple[Shape, ...] = ((4,), (4, 6), (5, 3), (1, 4), CUBES[0])


def _three(_shape: Shape, _dim: int) -> Shape:
    return (3,)


def _two_along(shape: Shape, dim: int) -> Shape:
    shape[dim]  # an IndexError where there is no such dim
    return (*shape[:dim], 2, *shape[dim % len(shape) + 1 :])


def _rows(shape: Shape, _dim: int) -> int:
    return size_along(shape, 0)


def _own_indices(shape: Shape, _dim: int) -> Shape:
    return (3, 2) if len(shape) > 1 else (3,)


INDICES = Argument(shapes=(_three,), kind=Kind.INDICES, high=size_along)
ORDER = Argument(shapes=(lambda _shape, _dim: (2,),), kind=Kind.ORDER, high=size_along)
ALONG = Argument(shapes=(_two_along,), kind=Kind.INDICES, high=size_along)

INDEXING = (
    *facts(
        "slices",
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
            "nonzero": "a.nonzero()",
            "unbind_second": "a.unbind(0)[1]",
            "iterate": "torch.stack([each * 2 for each in a])",
            "item": "a.sum().item()",
        },
        shapes=(*SHAPES, (0, 3)),
    ),
    *facts(
        "along a dim",
        {
            "select": "a.select(dim, 0)",
            "select_last": "a.select(dim, -1)",
            "narrow": "a.narrow(dim, 1, 2)",
            "narrow_start": "a.narrow(dim, 0, 1)",
        },
        takes_dim=True,
        shapes=SHAPES,
    ),
    *facts(
        "index tensors",
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
    *facts(
        "index tensors",
        {"index_fill": "a.index_fill(dim, b, 0.5)"},
        takes_dim=True,
        arguments=(ORDER,),
        shapes=SHAPES,
    ),
    *facts(
        "index tensors",
        {"gather": "a.gather(dim, b)", "scatter_add": "a.scatter_add(dim, b, torch.ones_like(b, dtype=a.dtype))"},
        takes_dim=True,
        arguments=(ALONG,),
        shapes=SHAPES,
    ),
    *facts(
        "index tensors",
        {"scatter_value": "a.scatter(dim, b, 0.5)"},
        takes_dim=True,
        arguments=(ALONG,),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *facts(
        "index tensors",
        {
            "index_tensor": "a[b]",
            "index_put": "a.index_put((b,), torch.ones_like(a[b]))",
            "index_put_add": "a.index_put((b,), a[b], accumulate=True)",
            "index_last": "a[..., b % a.shape[-1]]",
            "embedding": "F.embedding(b, a)",
        },
        arguments=(Argument(shapes=(_own_indices,), kind=Kind.INDICES, high=_rows),),
        shapes=((4, 6), (5, 3), (1, 4), CUBES[0]),
    ),
    *facts(
        "index tensors",
        {"embedding_padded": "F.embedding(b, a, padding_idx=0)", "embedding_bag": "F.embedding_bag(b, a, mode='sum')"},
        arguments=(Argument(shapes=(lambda _shape, _dim: (4, 3),), kind=Kind.INDICES, high=_rows),),
        shapes=((4, 6), (5, 3)),
    ),
    *facts(
        "masks",
        {"masked_select": "a.masked_select(b)", "index_mask": "a[b]", "masked_scatter": "a.masked_scatter(b, a * 2)"},
        arguments=(Argument(shapes=(same,), kind=Kind.MASK),),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *facts(
        "targets",
        {"one_hot": "F.one_hot(b, 6) + a.sum()", "bucketize": "torch.searchsorted(a.flatten().sort()[0], b.double() / 3)"},
        arguments=(INDICES,),
        shapes=((4, 6), (5, 3)),
    ),
    *facts(
        "slice assignment",
        {
            "assign_first": "out = a.clone()\nout[0] = 0.5\nout",
            "assign_slice": "out = a.clone()\nout[1:] = a[:-1]\nout",
            "assign_column": "out = a.clone()\nout[..., 0] = a[..., -1]\nout",
            "fill_slice": "out = a.clone()\nout[..., 1:].zero_()\nout",
            "mul_slice": "out = a.clone()\nout[1:].mul_(2)\nout",
        },
        shapes=(*MATRICES[:3], (4,), CUBES[0]),
    ),
    *facts(
        "slice assignment",
        {"assign_row": "out = a.clone()\nout[:1] = b\nout", "slice_scatter": "torch.slice_scatter(a, b, 0, 0, 1)"},
        arguments=(Argument(shapes=(row,)),),
        shapes=MATRICES[:3],
    ),
)
