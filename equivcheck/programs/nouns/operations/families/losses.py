"""Losses with every reduction."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import Argument, ArgumentKind, OperationFacts, Shape, first_shape, operations


def _rows(shape: Shape, _dim: int) -> Shape:
    return (shape[0], *shape[2:])


def _classes(shape: Shape, _dim: int) -> int:
    return max(1, shape[1]) if len(shape) > 1 else 1


REDUCTIONS = ("mean", "sum", "none")
_OF_TWO = {
    "mse_loss": "F.mse_loss(a, b, reduction='{}')",
    "l1_loss": "F.l1_loss(a, b, reduction='{}')",
    "smooth_l1_loss": "F.smooth_l1_loss(a, b, reduction='{}', beta=0.5)",
    "huber_loss": "F.huber_loss(a, b, reduction='{}')",
    "soft_margin_loss": "F.soft_margin_loss(a, b.detach().sign(), reduction='{}')",
    "bce_with_logits": "F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction='{}')",
    "bce": "F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction='{}')",
    "poisson_nll": "F.poisson_nll_loss(a, b, reduction='{}')",
    "gaussian_nll": "F.gaussian_nll_loss(a, b, b.detach().abs() + 0.5, reduction='{}')",
    "hinge_embedding": "F.hinge_embedding_loss(a, b.detach().sign(), reduction='{}')",
    "margin_ranking": "F.margin_ranking_loss(a, b, b.detach().sign(), reduction='{}')",
    "triplet": "F.triplet_margin_loss(a, b, a.detach() - 1, reduction='{}')",
    "weighted_mse": "F.mse_loss(a, b, weight=b.detach().abs(), reduction='{}')",
    "cross_entropy_soft": "F.cross_entropy(a, F.softmax(b, -1), reduction='{}')",
}
_OF_TARGETS = {
    "cross_entropy": "F.cross_entropy(a, b, reduction='{}')",
    "cross_entropy_ignoring": "F.cross_entropy(a, b, reduction='{}', ignore_index=0)",
    "cross_entropy_smooth": "F.cross_entropy(a, b, reduction='{}', label_smoothing=0.25)",
    "cross_entropy_weighted": "F.cross_entropy(a, b, weight=torch.ones_like(a.detach()[0].flatten()), reduction='{}')",
    "nll_loss": "F.nll_loss(F.log_softmax(a, 1), b, reduction='{}')",
    "multi_margin": "F.multi_margin_loss(a, b, reduction='{}')",
}


def _with_reductions(table: dict[str, str]) -> dict[str, str]:
    return {f"{name}_{reduction}": call.format(reduction) for name, call in table.items() for reduction in REDUCTIONS}


LOSSES: tuple[OperationFacts, ...] = (
    *operations(_with_reductions(_OF_TWO), arguments=(Argument(shapes=(first_shape,)),), shapes=((4, 6), (5, 3))),
    *operations(
        _with_reductions(_OF_TARGETS),
        arguments=(Argument(shapes=(_rows,), kind=ArgumentKind.INDICES, high=_classes),),
        shapes=((4, 6), (5, 3), (3, 4, 2)),
    ),
    *operations(
        {
            "cosine_similarity": "F.cosine_similarity(a, b, -1)",
            "pairwise_distance": "F.pairwise_distance(a, b)",
            "cdist": "torch.cdist(a, b)",
            "kl_div_batchmean": "F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction='batchmean')",
            "kl_div_sum": "F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction='sum')",
            "kl_div_log_target": "F.kl_div(F.log_softmax(a, 0), F.log_softmax(b, 0), reduction='batchmean', log_target=True)",
            "kl_div_none": "F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction='none')",
        },
        arguments=(Argument(shapes=(first_shape,)),),
        shapes=((4, 6), (5, 3)),
    ),
)
