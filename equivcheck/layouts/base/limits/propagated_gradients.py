"""Limits if gradients keep the placements that DTensor propagation gives them (`redistribute_gradients=False`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit
from equivcheck.layouts.base.limits.repairs import with_loop, with_widths
from equivcheck.scenario import Adamax, AdamW, ClipValue, Implementation, Layout, Training, ZeroGrad
from equivcheck.system.torch_version import is_torch_in

Applies = Callable[[Training, Layout], bool]

REFUSED_IN_PLACE = ">=2.12"
"""In these versions DTensor refuses in-place operations that change placements. Earlier versions apply them to each rank's
partial value."""

NOT_REFUSED_IN_PLACE = "<2.12"
"""Versions outside `REFUSED_IN_PLACE`."""

LOST_ON_ONE_RANK = "!=2.10.*,!=2.11.*"
"""Versions in which an in-place operation fails or has no effect even if the gradient is partial over a single rank."""


def limits_of_propagated_gradients(
    where: str,
    *,
    ranks: Callable[[Layout], int],
    cuts_short: Applies,
    leaves_pending: Applies,
    cuts_parameters: Callable[[Layout], bool],
) -> tuple[Limit, ...]:
    """Build these limits for one parallelism.

    Args:
        where: Class name, used in the reasons.
        ranks: Returns the ranks along its mesh axis.
        cuts_short: Whether a trained parameter is sharded along a dim shorter than the number of ranks.
        leaves_pending: Whether some gradient stays partial, even over one rank.
        cuts_parameters: Whether all parameters with such gradients are sharded, except a scalar scale.
    """
    option = f"{where}(redistribute_gradients=False)"

    def is_pending(training: Training, layout: Layout) -> bool:
        return leaves_pending(training, layout) and (ranks(layout) > 1 or is_torch_in(LOST_ON_ONE_RANK))

    def foreach_refuses(training: Training, layout: Layout) -> bool:
        return training.optimizer.implementation is Implementation.FOREACH and is_pending(training, layout)

    def takes_absolute_values(training: Training, layout: Layout) -> bool:
        # Weight decay makes the gradient of a sharded parameter sharded too. The scalar scale stays replicated, in no group.
        decays = training.model.scale and training.optimizer.weight_decay if cuts_parameters(layout) else _decays(training)
        changes = training.optimizer.maximize or bool(decays)
        return isinstance(training.optimizer, Adamax) and changes and foreach_refuses(training, layout)

    def adds_shards(training: Training, layout: Layout) -> bool:
        optimizer = training.optimizer
        is_decoupled = isinstance(optimizer, AdamW) or getattr(optimizer, "decoupled_weight_decay", False)
        adds = optimizer.maximize and _decays(training) and not is_decoupled
        return adds and cuts_parameters(layout) and ranks(layout) > 1 and foreach_refuses(training, layout)

    clamps = UpstreamLimit(
        reason=f"{option}: clip_grad_value_ is not supported: it clamps in place, which DTensor refuses for a partial gradient",
        applies=lambda training, layout: isinstance(training.clipping, ClipValue) and is_pending(training, layout),
        repair=lambda training, _layout: replace(training, clipping=None),
        torch=REFUSED_IN_PLACE,
    )
    zeroes = UpstreamLimit(
        reason=f"{option}: zero_grad(set_to_none=False) of a foreach or fused optimizer is not supported: it zeroes in place, "
        "which DTensor refuses for a partial gradient",
        applies=lambda training, layout: _zeroes_by_foreach(training) and is_pending(training, layout),
        repair=lambda training, _layout: replace(training, zero_grad=ZeroGrad.NONE),
        torch=REFUSED_IN_PLACE,
    )
    return (
        UpstreamLimit(
            reason=f"{option}: a dim that is shorter than the number of ranks it is sharded over is not supported: propagation "
            "leaves its gradient replicated, and no optimizer updates a sharded parameter in place by a replicated gradient",
            applies=cuts_short,
            repair=lambda training, layout: with_widths(training, ranks(layout)),
            torch=REFUSED_IN_PLACE,
        ),
        clamps,
        _done_wrongly(clamps, f"{option}: clip_grad_value_ is not supported: it clamps each rank's partial sum of a gradient"),
        zeroes,
        _done_wrongly(
            zeroes,
            f"{option}: zero_grad(set_to_none=False) of a foreach or fused optimizer is not supported: it does not zero partial "
            "gradients",
        ),
        UpstreamLimit(
            reason=f"{option}: foreach Adamax with maximize or weight_decay is not supported: it takes absolute values in "
            "place, which DTensor refuses for partial gradients",
            applies=takes_absolute_values,
            repair=with_loop,
            torch=REFUSED_IN_PLACE,
        ),
        UpstreamLimit(
            reason=f"{option}: a foreach optimizer with maximize that adds weight_decay to the gradients is not supported: it "
            "adds in place to partial gradients, and DTensor cannot redistribute shards to Partial",
            applies=adds_shards,
            repair=with_loop,
            torch=f"{REFUSED_IN_PLACE},<2.14",
        ),
    )


def _done_wrongly(refused: Limit, reason: str) -> Limit:
    """The limit for versions that compute a wrong result without an error, so `frontier` cannot test it."""
    return replace(refused, reason=reason, upstream=False, torch=NOT_REFUSED_IN_PLACE)


def _zeroes_by_foreach(training: Training) -> bool:
    is_loop = training.optimizer.implementation is Implementation.FOR_LOOP
    return training.zero_grad is ZeroGrad.ZERO and not is_loop and training.steps > 1


def _decays(training: Training) -> bool:
    return bool(training.optimizer.weight_decay) or any(group.weight_decay for group in training.groups)
