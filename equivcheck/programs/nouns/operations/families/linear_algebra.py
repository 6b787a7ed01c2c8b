"""Decompositions, inverses and solutions, reduced to results without arbitrary signs."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import Argument, Shape, operations

SQUARES: tuple[Shape, ...] = ((4, 4), (3, 3), (2, 3, 3))
_REGULAR_OWN = "a + torch.diag_embed(torch.full_like(a[..., 0], 8.0))"


def _columns(shape: Shape, _dim: int) -> Shape:
    return (*shape[:-1], 2)


def _with_regular(table: dict[str, str]) -> dict[str, str]:
    return {name: f"m = {_REGULAR_OWN}\n{call}" for name, call in table.items()}


def _with_definite(table: dict[str, str]) -> dict[str, str]:
    return {name: f"m = {_REGULAR_OWN}\nm = m @ m.mT\n{call}" for name, call in table.items()}


LINEAR_ALGEBRA = (
    *operations(
        _with_regular(
            {
                "det": "torch.linalg.det(m)",
                "slogdet": "torch.linalg.slogdet(m)",
                "inverse": "torch.linalg.inv(m)",
                "matrix_exp": "torch.linalg.matrix_exp(m / 16)",
                "matrix_power": "torch.linalg.matrix_power(m / 8, 3)",
                "pinv": "torch.linalg.pinv(m)",
                "singular_values": "torch.linalg.svdvals(m)",
                "lu_factor": "torch.linalg.lu_factor(m)[0]",
                "lu_product": "p, l, u = torch.linalg.lu(m)\np @ l @ u",
                "qr_product": "q, r = torch.linalg.qr(m)\nq @ r",
                "qr_signless": "torch.linalg.qr(m)[1].abs()",
            }
        ),
        shapes=SQUARES,
    ),
    *operations(
        _with_definite(
            {
                "cholesky": "torch.linalg.cholesky(m)",
                "cholesky_inverse": "torch.cholesky_inverse(torch.linalg.cholesky(m).detach())",
                "eigenvalues": "torch.linalg.eigvalsh(m)",
                "nuclear_norm": "torch.linalg.matrix_norm(m, 'nuc')",
                "spectral_norm": "torch.linalg.matrix_norm(m, 2)",
            }
        ),
        shapes=SQUARES,
    ),
    *operations(
        _with_regular(
            {
                "solve": "torch.linalg.solve(m, b)",
                "solve_triangular": "torch.linalg.solve_triangular(m.triu(), b, upper=True)",
                "lu_solve": "factors, pivots = torch.linalg.lu_factor(m)\ntorch.linalg.lu_solve(factors, pivots, b)",
            }
        ),
        arguments=(Argument(shapes=(_columns,)),),
        shapes=SQUARES,
    ),
    *operations(
        {
            "trace": "torch.trace(a)",
            "kron": "torch.kron(a, a[:1])",
            "matrix_norm_1": "torch.linalg.matrix_norm(a, 1)",
            "matrix_norm_inf": "torch.linalg.matrix_norm(a, float('inf'))",
            "diagonal_scatter": "torch.diagonal_scatter(a, torch.zeros_like(a.diagonal()))",
            "tensordot": "torch.tensordot(a, a, dims=([0], [0]))",
            "chain_matmul": "torch.linalg.multi_dot([a, a.t(), a])",
            "einsum_diagonal": "torch.einsum('ii->i', a)",
            "einsum_outer": "torch.einsum('ij,kl->ikjl', a, a)",
            "einsum_all": "torch.einsum('ij,ik->', a, a)",
        },
        shapes=((4, 4), (3, 3), (4, 6), (5, 3)),
    ),
)
