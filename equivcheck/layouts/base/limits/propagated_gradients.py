"""Limits if gradients keep the placements that DTensor propagation gives them (`redistribute_gradients=False`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit
from equivcheck.layouts.base.limits.repairs import with_loop, with_widths
from equivcheck.scenario import Adamax, AdamW, ClipValue, Implementation, Layout, Training, ZeroGrad
from equivcheck.system.torch_version import is_torch_in

Applies = Callable[[Training, Layout], bool]

REFUSED_IN_PLACE = ">=2.12"
"""Versions in which DTensor refuses to change placements in place. Earlier versions apply such an operation to each rank's
partial sum.
"""

NOT_REFUSED_IN_PLACE = "<2.12"
"""Versions outside `REFUSED_IN_PLACE`."""

LOST_ON_ONE_RANK = "!=2.10.*,!=2.11.*"
"""Versions in which an in-place operation fails or has no effect even if the gradient is partial over a single rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedGradients:
    """Limits for a parallelism whose gradients keep the placements that DTensor's sharding propagation gives them."""

    where: str
    """Name of the parallelism's class, used in the reasons of the limits."""
    ranks: Callable[[Layout], int]
    """Returns the number of ranks along the parallelism's mesh axis."""
    cuts_short: Applies
    """Returns whether a trained parameter is sharded along a dim shorter than the number of ranks."""
    leaves_pending: Applies
    """Returns whether the gradient of some parameter stays partial, even over one rank."""
    cuts_parameters: Callable[[Layout], bool]
    """Returns whether all parameters with such gradients are sharded. A scalar scale does not count."""

    def limits(self) -> tuple[Limit, ...]:
        """Return the limits for this parallelism."""
        clamps = self._refused(
            "clip_grad_value_ is not supported: it clamps in place, which DTensor refuses for a partial gradient",
            lambda training, layout: isinstance(training.clipping, ClipValue) and self._is_pending(training, layout),
            lambda training, _layout: replace(training, clipping=None),
        )
        zeroes = self._refused(
            "zero_grad(set_to_none=False) of a foreach or fused optimizer is not supported: it zeroes in place, which DTensor "
            "refuses for a partial gradient",
            lambda training, layout: _zeroes_by_foreach(training) and self._is_pending(training, layout),
            lambda training, _layout: replace(training, zero_grad=ZeroGrad.NONE),
        )
        return (
            self._refused(
                "a dim that is shorter than the number of ranks it is sharded over is not supported: propagation leaves its "
                "gradient replicated, and no optimizer updates a sharded parameter in place by a replicated gradient",
                self.cuts_short,
                lambda training, layout: with_widths(training, self.ranks(layout)),
            ),
            clamps,
            self._done_wrongly(clamps, "clip_grad_value_ is not supported: it clamps each rank's partial sum of a gradient"),
            zeroes,
            self._done_wrongly(
                zeroes,
                "zero_grad(set_to_none=False) of a foreach or fused optimizer is not supported: it does not zero partial "
                "gradients",
            ),
            self._refused(
                "foreach Adamax with maximize or weight_decay is not supported: it takes absolute values in place, which "
                "DTensor refuses for partial gradients",
                self._takes_absolute_values,
                with_loop,
            ),
            self._refused(
                "a foreach optimizer with maximize that adds weight_decay to the gradients is not supported: it adds in place "
                "to partial gradients, and DTensor cannot redistribute shards to Partial",
                self._adds_shards,
                with_loop,
                torch=f"{REFUSED_IN_PLACE},<2.14",
            ),
        )

    def _refused(
        self, reason: str, applies: Applies, repair: Callable[[Training, Layout], Training], torch: str = REFUSED_IN_PLACE
    ) -> Limit:
        return UpstreamLimit(reason=self._with_option(reason), applies=applies, repair=repair, torch=torch)

    def _done_wrongly(self, refused: Limit, reason: str) -> Limit:
        """Return the limit for versions that compute a wrong result without an error. `frontier` cannot test such a limit."""
        reason = self._with_option(reason)
        return Limit(reason=reason, applies=refused.applies, repair=refused.repair, torch=NOT_REFUSED_IN_PLACE)

    def _with_option(self, reason: str) -> str:
        return f"{self.where}(redistribute_gradients=False): {reason}"

    def _is_pending(self, training: Training, layout: Layout) -> bool:
        return self.leaves_pending(training, layout) and (self.ranks(layout) > 1 or is_torch_in(LOST_ON_ONE_RANK))

    def _foreach_refuses(self, training: Training, layout: Layout) -> bool:
        return training.optimizer.implementation is Implementation.FOREACH and self._is_pending(training, layout)

    def _takes_absolute_values(self, training: Training, layout: Layout) -> bool:
        # Weight decay makes the gradient of a sharded parameter sharded too. The scalar scale stays replicated, in no group.
        is_cut = self.cuts_parameters(layout)
        decays = training.model.scale and training.optimizer.weight_decay if is_cut else _decays(training)
        changes = training.optimizer.maximize or bool(decays)
        return isinstance(training.optimizer, Adamax) and changes and self._foreach_refuses(training, layout)

    def _adds_shards(self, training: Training, layout: Layout) -> bool:
        optimizer = training.optimizer
        is_decoupled = isinstance(optimizer, AdamW) or getattr(optimizer, "decoupled_weight_decay", False)
        adds = optimizer.maximize and _decays(training) and not is_decoupled
        return adds and self.cuts_parameters(layout) and self.ranks(layout) > 1 and self._foreach_refuses(training, layout)


def _zeroes_by_foreach(training: Training) -> bool:
    is_loop = training.optimizer.implementation is Implementation.FOR_LOOP
    return training.zero_grad is ZeroGrad.ZERO and not is_loop and training.steps > 1


def _decays(training: Training) -> bool:
    return bool(training.optimizer.weight_decay) or any(group.weight_decay for group in training.groups)
