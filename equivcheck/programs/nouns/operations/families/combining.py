"""Joining and splitting tensors: cat, stack, split, chunk, pad; some results are unused."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import CUBES, MATRICES, Argument, Shape, first_shape, operations

SHAPES: tuple[Shape, ...] = ((4,), (4, 6), (5, 3), (1, 4), CUBES[0])


def _longer(shape: Shape, dim: int) -> Shape:
    shape[dim]  # raises IndexError if there is no such dim
    return (*shape[:dim], shape[dim] + 1, *shape[dim % len(shape) + 1 :])


COMBINING = (
    *operations(
        {
            "cat": "torch.cat([a, b], dim)",
            "cat_thrice": "torch.cat([a, b, a * 2], dim)",
            "stack": "torch.stack([a, b], dim)",
        },
        takes_dim=True,
        arguments=(Argument(shapes=(first_shape,)),),
        shapes=((4,), (4, 6), (5, 3), (0, 3)),
    ),
    *operations(
        {"cat_uneven": "torch.cat([a, b], dim)"},
        takes_dim=True,
        arguments=(Argument(shapes=(_longer,)),),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *operations(
        {
            "chunk": "a.chunk(2, dim)",
            "chunk_three": "a.chunk(3, dim)",
            "split": "a.split(2, dim)",
            "split_sizes": "a.split([1, a.shape[dim] - 1], dim)",
            "tensor_split": "a.tensor_split(2, dim)",
            "unbind": "a.unbind(dim)",
            "swiglu": "gate, up = a.chunk(2, dim)\nF.silu(gate) * up",
            "rotate_half": "first, second = a.chunk(2, dim)\ntorch.cat([-second, first], dim)",
        },
        takes_dim=True,
        shapes=SHAPES,
    ),
    *operations(
        {
            "cat_one": "torch.cat([a], dim)",
            "cat_int": "torch.cat([a, (b * 8).long()], dim)",
            "stack_thrice": "torch.stack([a, b, a], dim)",
            "cat_then_split": "torch.cat([a, b], dim).split(a.shape[dim], dim)[1]",
        },
        takes_dim=True,
        arguments=(Argument(shapes=(first_shape,)),),
        shapes=((5, 3),),
    ),
    *operations(
        {
            "chunk_second": "a.chunk(2, dim)[1]",
            "chunk_last_of_three": "a.chunk(3, dim)[-1] * 2",
            "split_first": "a.split(2, dim)[0].exp()",
            "split_unsafe": "a.unsafe_split(2, dim)",
            "split_copy": "torch.split_with_sizes_copy(a.detach(), [1, a.shape[dim] - 1], dim)",
            "qkv": "query, _, value = a.tensor_split(3, dim)\n(query.sum(), value.exp())",
        },
        takes_dim=True,
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {
            "hstack": "torch.hstack([a, b])",
            "vstack": "torch.vstack([a, b])",
            "dstack": "torch.dstack([a, b])",
            "column_stack": "torch.column_stack([a, b])",
            "block_diag": "torch.block_diag(a, b)",
            "cat_of_sums": "torch.cat([a.sum(0, keepdim=True), b])",
            "cartesian": "torch.cartesian_prod(a.flatten()[:2], b.flatten()[:2])",
        },
        arguments=(Argument(shapes=(first_shape,)),),
        shapes=((4,), (4, 6), (5, 3)),
    ),
    *operations(
        {
            "pad_last": "F.pad(a, (1, 0))",
            "pad_both": "F.pad(a, (0, 1), value=0.5)",
            "pad_rows": "F.pad(a, (0, 0, 1, 1))",
            "pad_crop": "F.pad(a, (-1, 0))",
            "pad_replicate": "F.pad(a[None], (1, 1), mode='replicate')",
            "pad_reflect": "F.pad(a[None], (1, 1), mode='reflect')",
        },
        shapes=MATRICES,
    ),
)
