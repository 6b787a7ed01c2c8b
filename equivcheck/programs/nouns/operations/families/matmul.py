"""Products: matrices, batches, vectors, einsum, linear layers, attention."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import (
    BATCHES,
    CUBES,
    MATRICES,
    VECTORS,
    Argument,
    Shape,
    first_shape,
    last_dim,
    operations,
)

WIDTH = 5
"""Columns in the second matrix."""
WEIGHED = "attention"
"""Operation without a sharding rule.
For each shape, DTensor tries all placements of its decomposition three times, 10 s each, before it refuses. A mask makes that
more than 3 min, so no operation has a mask (torch 2.13)."""


def _columns(shape: Shape, _dim: int) -> Shape:
    return (shape[-1], WIDTH)


def _rows_of_weight(shape: Shape, _dim: int) -> Shape:
    return (WIDTH, shape[-1])


def _bias(_shape: Shape, _dim: int) -> Shape:
    return (WIDTH,)


def _batch(shape: Shape, _dim: int) -> Shape:
    return (*shape[:-2], shape[-1], WIDTH)


def _product(shape: Shape, _dim: int) -> Shape:
    return (*shape[:-1], WIDTH)


def _vector(_shape: Shape, _dim: int) -> Shape:
    return (WIDTH,)


def _first(shape: Shape, _dim: int) -> Shape:
    return (shape[0],)


MATMUL = (
    *operations(
        {
            "mm": "a @ b",
            "mm_relu": "F.relu(torch.mm(a, b))",
            "mm_out": "torch.mm(a.detach(), b.detach(), out=(a @ b).detach())",
            "mm_of_sums": "(a + a) @ (b * b)",
            "einsum_ij_jk": "torch.einsum('ij,jk->ik', a, b)",
            "einsum_ij_jk_ki": "torch.einsum('ij,jk->ki', a, b)",
            "einsum_ij_jk_to_j": "torch.einsum('ij,jk->j', a, b)",
        },
        arguments=(Argument(shapes=(_columns,)),),
        shapes=MATRICES,
    ),
    *operations(
        {
            "linear": "F.linear(a, b)",
            "mm_transposed": "a @ b.t()",
            "einsum_ij_kj": "torch.einsum('...j,kj->...k', a, b)",
        },
        arguments=(Argument(shapes=(_rows_of_weight,)),),
        shapes=(*MATRICES, CUBES[0], VECTORS[0]),
    ),
    *operations(
        {"linear_bias": "F.linear(a, b, c)"},
        arguments=(Argument(shapes=(_rows_of_weight,)), Argument(shapes=(_bias,))),
        shapes=((4, 6), (5, 3), (2, 3, 4), (4,)),
    ),
    *operations(
        {
            "addmm": "torch.addmm(c, a, b)",
            "addmm_scaled": "torch.addmm(c, a, b, beta=0.5, alpha=2)",
            "addmm_no_bias": "torch.addmm(c, a, b, beta=0)",
        },
        arguments=(Argument(shapes=(_columns,)), Argument(shapes=(_bias, _product))),
        shapes=((4, 6), (5, 3)),
    ),
    *operations(
        {
            "bmm": "torch.bmm(a, b)",
            "matmul_batches": "a @ b",
            "einsum_bij": "torch.einsum('bij,bjk->bik', a, b)",
            "einsum_bij_shared": "torch.einsum('bij,bjk->ik', a, b)",
            "bmm_transposed": "torch.bmm(b.mT, a.mT)",
        },
        arguments=(Argument(shapes=(_batch,)),),
        shapes=BATCHES,
    ),
    *operations(
        {"baddbmm": "torch.baddbmm(c, a, b)"},
        arguments=(Argument(shapes=(_batch,)), Argument(shapes=(_product,))),
        shapes=BATCHES[:1],
    ),
    *operations(
        {"matmul_shared": "a @ b"},
        arguments=(Argument(shapes=(_columns,)),),
        shapes=(*BATCHES, *VECTORS[:2]),
    ),
    *operations(
        {"mv": "a @ b", "einsum_ij_j": "torch.einsum('...j,j->...', a, b)"},
        arguments=(Argument(shapes=(last_dim,)),),
        shapes=(*MATRICES, CUBES[0], *VECTORS),
    ),
    *operations({"dot": "torch.dot(a, b)"}, arguments=(Argument(shapes=(first_shape,)),), shapes=VECTORS),
    *operations({"outer": "torch.outer(a, b)"}, arguments=(Argument(shapes=(_vector,)),), shapes=VECTORS),
    *operations({"vecmat": "b @ a"}, arguments=(Argument(shapes=(_first,)),), shapes=MATRICES),
    *operations(
        {"gram": "a @ a.t()", "einsum_trace": "torch.einsum('ij,ij->', a, a)", "einsum_sum": "torch.einsum('ij->j', a)"},
        shapes=MATRICES,
    ),
    *operations(
        {
            "attention_by_hand": "torch.softmax(a @ b.mT / a.shape[-1] ** 0.5, -1) @ c",
            "attention_causal": "F.scaled_dot_product_attention(a, b, c, is_causal=True)",
        },
        arguments=(Argument(shapes=(first_shape,)), Argument(shapes=(first_shape,))),
        shapes=((2, 2, 3, 4), (1, 4, 2, 3)),
    ),
    *operations(
        {WEIGHED: "F.scaled_dot_product_attention(a, b, c)"},
        arguments=(Argument(shapes=(first_shape,)), Argument(shapes=(first_shape,))),
        shapes=((2, 2, 3, 4),),
    ),
)
