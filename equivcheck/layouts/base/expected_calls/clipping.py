"""Expected calls for `torch.nn.utils.clip_grad_norm_` on DTensor gradients."""

from __future__ import annotations

from collections.abc import Iterable

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.torch_versions import LARGEST_NORM_FIRST, SUM_OF_NORMS_FIRST
from equivcheck.layouts.base.partition import cut_dim
from equivcheck.scenario import ClipNorm, ExpertParallel, NormType, PlannedParallelism, ZeroGrad
from equivcheck.system.torch_version import torch_in
from equivcheck.worlds.trace.stage import Stage


def dtensor_clipping(view: RankView, axes: Iterable[str], kind: Iterable[Held]) -> Totals:
    """Calls in all steps for one group of DTensor gradients, some sharded along each of `axes`.

    All norms form one tensor, which is reduced over one axis after another. Some torch versions combine the norms before they
    reduce. If no gradient exists, nothing is reduced.
    """
    clipping, ledger = view.training.clipping, Ledger(Stage.CLIPPING)
    if not isinstance(clipping, ClipNorm):
        return {}
    parameters = tuple(kind)
    op, combined = ("max", LARGEST_NORM_FIRST) if clipping.norm_type is NormType.INF else ("sum", SUM_OF_NORMS_FIRST)
    cut_along = [name for name in axes if view.layout.mesh.size(name) > 1]
    for step in range(view.training.steps):
        num_norms = sum(keeps_gradient(view, held, step) for held in parameters)
        for name in cut_along if num_norms else ():
            ledger.note(step, f"all_reduce.{op}", view.axes(name), (1 if torch_in(combined) else num_norms) * view.item_bytes)
    return ledger.totals


def clipping_of_parts(view: RankView, axis: str, parts: Iterable[Held]) -> Totals:
    """Calls in all steps for plain tensors sharded along an axis.

    Each step reduces one norm, or two norms if some tensors are also sharded along another axis.
    """
    clipping, ledger, cut = view.training.clipping, Ledger(Stage.CLIPPING), tuple(parts)
    if not isinstance(clipping, ClipNorm) or view.layout.mesh.size(axis) == 1:
        return {}
    op = "max" if clipping.norm_type is NormType.INF else "sum"
    for step in range(view.training.steps):
        kinds = {axes_of_cuts(view, held) for held in cut if keeps_gradient(view, held, step)}
        if kinds:
            ledger.note(step, f"all_reduce.{op}", view.axes(axis), len(kinds) * view.item_bytes, len(kinds))
    return ledger.totals


def axes_of_cuts(view: RankView, held: Held) -> tuple[str, ...]:
    """Mesh axes that split a parameter into plain local tensors."""
    cutting = view.layout.of(PlannedParallelism, ExpertParallel)
    axes = (view.layout.axes_of(each)[-1] for each in cutting if cut_dim(each, held.parameter) is not None)
    return tuple(axis for axis in axes if view.layout.mesh.size(axis) > 1)


def keeps_gradient(view: RankView, held: Held, step: int) -> bool:
    """Whether a parameter has a gradient after a step's backward.

    With `zero_grad(set_to_none=False)`, earlier gradients still exist as zeros.
    """
    steps = range(step + 1) if view.training.zero_grad is ZeroGrad.ZERO else (step,)
    return any(view.has_gradient(held, before) for before in steps)
