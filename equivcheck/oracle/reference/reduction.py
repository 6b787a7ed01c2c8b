"""How the gradients of data-parallel ranks become those that they step by, emulated on one device by plain arithmetic.

Both emulators of data parallelism accumulate and average here: the reference of a layout that rounds, and the diagnosis of one
that diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from equivcheck.layouts.base.rounding import Division, WhenReduced

Gradients = dict[str, torch.Tensor]
"""By the name of the parameter; those without a gradient are not there."""


class AccumulatedGradients:
    """The gradients of all ranks while the microbatches of a step are computed."""

    def __init__(
        self,
        reduced: Sequence[Gradients],
        reduce: Callable[[list[Gradients], bool], list[Gradients]],
        *,
        when: WhenReduced,
        waits_as: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`reduced` is what each rank has from before.

        `reduce` gives each rank its mean, told whether it is the step's last; `waits_as` gives a gradient as it waits for
        further ones, None as it is.
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

    def waits(self, rank: int, name: str) -> bool:
        """Whether a gradient of earlier microbatches waits for further ones."""
        return name in self._waiting[rank]

    def end_microbatch(self, *, last: bool) -> None:
        """Reduce what waits, if it is time to."""
        if last or not self._when.once:
            means = self._reduce(self._waiting, last)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How the gradients that ranks have are added up and divided, in the element type that they have."""

    division: Division
    """When they are divided."""
    divisor: float
    """What their sum is divided by: the number of ranks for a mean."""
    shards: int | None = None
    """Ranks whose gradients are added up in the first stage; the second adds up these sums. None for one stage."""
    ordered: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list
    """The order in which some are added up."""

    def mean(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the gradients that there are, one a rank."""
        return self.mean_of_sums(self.sums(parts))

    def sums(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the first stage gives."""
        before, between, _ = self._divisors()
        is_scaled, size = self.division is Division.SCALED, self.shards or len(parts)
        divided = [part * (1.0 / before) if is_scaled else part / before for part in parts]
        stages = [divided[start : start + size] for start in range(0, len(divided), size)]
        return [_sum(self.ordered(stage)) / between for stage in stages]

    def mean_of_sums(self, sums: list[torch.Tensor]) -> torch.Tensor:
        """What the second stage makes of it."""
        return _sum(self.ordered(sums)) / self._divisors()[-1]

    def _divisors(self) -> tuple[float, float, float]:
        """What each part is divided by, then each sum of the first stage, then the sum of these."""
        divisor, shards = self.divisor, self.shards or self.divisor
        if self.division in (Division.BEFORE, Division.SCALED):
            return divisor, 1, 1
        if self.division is Division.LAST:
            return 1, 1, divisor
        if self.division is Division.AFTER:
            return 1, shards, divisor / shards
        power = 1
        while divisor % power == 0 and divisor / power > power:
            power *= 2
        return power, 1, divisor / power


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = parts
    for other in others:
        first = first + other
    return first
