"""What torch refuses where gradients keep the placements that propagation gave them (`redistribute_gradients=False`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.layouts.limits.limit import Limit
from equivcheck.layouts.limits.repairs import with_widths
from equivcheck.scenario import Adamax, ClipValue, Implementation, Layout, Training, ZeroGrad

Applies = Callable[[Training, Layout], bool]


def limits_of_propagated_gradients(
    where: str, *, ranks: Callable[[Layout], int], cuts_short: Applies, leaves_pending: Applies, pends_whole: Applies
) -> tuple[Limit, ...]:
    """The limits of one parallelism.

    Args:
        where: The parallelism in words.
        ranks: Ranks along its axis.
        cuts_short: Whether a trained parameter is cut along a dim that is shorter than the ranks are many.
        leaves_pending: Whether some gradient is left pending a sum.
        pends_whole: Whether that is so of a parameter that every rank has whole.
    """
    option = f"{where} without redistribute_gradients"
    return (
        Limit(
            reason=f"{option}: of a dim cut over more ranks than it is long propagation leaves the gradient whole, and no "
            "optimizer updates a cut parameter in place by a whole gradient",
            applies=cuts_short,
            repair=lambda training, layout: with_widths(training, ranks(layout)),
            upstream=True,
        ),
        Limit(
            reason=f"{option}: clip_grad_value_ clamps in place, which is refused while a gradient is pending a sum over ranks",
            applies=lambda training, layout: isinstance(training.clipping, ClipValue) and leaves_pending(training, layout),
            repair=lambda training, _layout: replace(training, clipping=None),
            upstream=True,
        ),
        Limit(
            reason=f"{option}: zero_grad(set_to_none=False) of foreach and fused optimizers zeroes in place, which is refused "
            "while a gradient is pending a sum over ranks",
            applies=lambda training, layout: _zeroes_by_foreach(training) and leaves_pending(training, layout),
            repair=lambda training, _layout: replace(training, zero_grad=ZeroGrad.NONE),
            upstream=True,
        ),
        Limit(
            reason=f"{option}: the foreach implementation of Adamax with weight_decay takes absolute values in place, which is "
            "refused while they are pending a sum over ranks",
            applies=lambda training, layout: _is_decaying_foreach_adamax(training) and pends_whole(training, layout),
            repair=_with_loop,
            upstream=True,
        ),
    )


def _zeroes_by_foreach(training: Training) -> bool:
    is_loop = training.optimizer.implementation is Implementation.FOR_LOOP
    return training.zero_grad is ZeroGrad.ZERO and not is_loop and training.steps > 1


def _is_decaying_foreach_adamax(training: Training) -> bool:
    optimizer = training.optimizer
    decays = bool(optimizer.weight_decay) or any(group.weight_decay for group in training.groups)
    return isinstance(optimizer, Adamax) and optimizer.implementation is Implementation.FOREACH and decays


def _with_loop(training: Training, _layout: Layout) -> Training:
    return replace(training, optimizer=replace(training.optimizer, implementation=Implementation.FOR_LOOP))
