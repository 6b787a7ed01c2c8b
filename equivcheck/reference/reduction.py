"""How the gradients of data-parallel ranks become those that they step by, emulated on one device by plain arithmetic.

Both emulators of data parallelism accumulate and average here: the reference of a layout that rounds, and the diagnosis of one
that diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from equivcheck.layouts.rounding import Division, WhenReduced

Gradients = dict[str, torch.Tensor]
"""By the name of the parameter; those without a gradient are not there."""


class AccumulatedGradients:
    """The gradients of all ranks while the microbatches of a step are computed."""

    def __init__(
        self,
        reduced: Sequence[Gradients],
        reduce: Callable[[list[Gradients]], list[Gradients]],
        *,
        when: WhenReduced,
        waits_as: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`reduced` is what each rank has from before.

        `reduce` gives each rank its mean; `waits_as` gives a gradient as it waits for further ones, None as it is.
        """
        self.reduced, self._reduce = list(reduced), reduce
        self._when, self._waits_as = when, waits_as or _as_it_is
        self._waiting = self._kept()

    def add(self, rank: int, fresh: Gradients) -> None:
        """Add what a rank has computed of a microbatch to what waits for a reduction."""
        self._waiting[rank] = _added(self._waiting[rank], fresh, self._waits_as)

    def add_unreduced(self, rank: int, fresh: Gradients) -> None:
        """Add what a rank has computed of a microbatch to its own gradients, as if it had been reduced."""
        self.reduced[rank] = _added(self.reduced[rank], fresh)

    def end_microbatch(self, *, last: bool) -> None:
        """Reduce what waits, if it is time to."""
        if last or not self._when.once:
            means = self._reduce(self._waiting)
            self.reduced = means if self._when.whole else list(map(_added, self.reduced, means))
            self._waiting = self._kept()

    def _kept(self) -> list[Gradients]:
        """What ranks begin to accumulate with: the result of the last reduction, if they keep whole gradients."""
        return [dict(each) if self._when.whole else {} for each in self.reduced]


def _as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _added(old: Gradients, new: Gradients, first: Callable[[torch.Tensor], torch.Tensor] = _as_it_is) -> Gradients:
    """Sums in the element types of what is there already."""
    sums = {name: (old[name] + value).to(old[name].dtype) if name in old else first(value) for name, value in new.items()}
    return old | sums


def mean_of(
    parts: Sequence[torch.Tensor],
    division: Division,
    *,
    divisor: float,
    shards: int | None = None,
    ordered: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
) -> torch.Tensor:
    """The sum of the gradients that there are over a divisor, in the element type that they have: the number of ranks for a mean.

    Those of each `shards` ranks (None for all) are added up first, in the order that `ordered` gives, then these sums.
    """
    before, between, after = _divisors(division, divisor, shards or divisor)
    divided = [part / before for part in parts]
    size = shards or len(parts)
    stages = [divided[start : start + size] for start in range(0, len(divided), size)]
    sums = [_sum(ordered(stage)) / between for stage in stages]
    return _sum(ordered(sums)) / after


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _divisors(division: Division, divisor: float, shards: float) -> tuple[float, float, float]:
    """What each part is divided by, then each sum over shards, then the sum of these."""
    if division is Division.BEFORE:
        return divisor, 1, 1
    if division is Division.LAST:
        return 1, 1, divisor
    if division is Division.AFTER:
        return 1, shards, divisor / shards
    power = 1
    while divisor % power == 0 and divisor / power > power:
        power *= 2
    return power, 1, divisor / power
