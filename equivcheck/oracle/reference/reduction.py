"""Compute on one device how data-parallel ranks accumulate and average gradients.

The single-device run for low precision and the diagnosis both use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from equivcheck.layouts.base.rounding import Division, WhenReduced

Gradients = dict[str, torch.Tensor]
"""Gradients by parameter name. Parameters without a gradient are missing."""


class AccumulatedGradients:
    """Gradients of all data-parallel ranks, emulated on one device while a step's microbatches are computed."""

    def __init__(
        self,
        reduced: Sequence[Gradients],
        reduce: Callable[[list[Gradients], bool], list[Gradients]],
        *,
        when: WhenReduced,
        waits_as: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`reduced` holds each rank's gradients from earlier steps.

        `reduce(gradients, last)` returns each rank's mean. `waits_as` converts the first gradient that waits for a reduction;
        None keeps it unchanged.
        """
        self.reduced, self._reduce = list(reduced), reduce
        self._when, self._waits_as = when, waits_as or _as_it_is
        self._waiting = self._kept()

    def add(self, rank: int, fresh: Gradients) -> None:
        """Add the gradients from one microbatch on a rank to those not yet reduced."""
        self._waiting[rank] = _added(self._waiting[rank], fresh, self._waits_as)

    def waits(self, rank: int, name: str) -> bool:
        """Whether the rank has a gradient from earlier microbatches that is not yet reduced."""
        return name in self._waiting[rank]

    def end_microbatch(self, *, last: bool) -> None:
        """Reduce the gradients over ranks, if the layout reduces after each microbatch or this is the `last` one."""
        if last or not self._when.once:
            means = self._reduce(self._waiting, last)
            self.reduced = means if self._when.whole else list(map(_added, self.reduced, means))
            self._waiting = self._kept()

    def _kept(self) -> list[Gradients]:
        return [dict(each) if self._when.whole else {} for each in self.reduced]


def _as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _added(old: Gradients, new: Gradients, first: Callable[[torch.Tensor], torch.Tensor] = _as_it_is) -> Gradients:
    sums = {name: (old[name] + value).to(old[name].dtype) if name in old else first(value) for name, value in new.items()}
    return old | sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How ranks average gradients: the order of the sum, the divisor, and when they divide."""

    division: Division
    """When gradients are divided: before, between or after the sums."""
    divisor: float
    """Number by which the sum is divided, for a mean the number of ranks."""
    shards: int | None = None
    """Number of ranks in the first stage if HSDP adds gradients in two stages. The second stage adds the first stage's sums. None
    if there is one stage.
    """
    ordered: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list
    """Function that sorts gradients into the order in which they are added."""

    def mean(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the average over gradients from all ranks."""
        return self.mean_of_sums(self.sums(parts))

    def sums(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the first stage's sums. Each sum adds the gradients from `shards` consecutive ranks.

        If `shards` is None, there is only one stage, so the result is one sum over all ranks.
        """
        before, between, _ = self._divisors()
        is_scaled, size = self.division is Division.SCALED, self.shards or len(parts)
        divided = [part * (1.0 / before) if is_scaled else part / before for part in parts]
        stages = [divided[start : start + size] for start in range(0, len(divided), size)]
        return [_sum(self.ordered(stage)) / between for stage in stages]

    def mean_of_sums(self, sums: list[torch.Tensor]) -> torch.Tensor:
        """Return the average over all ranks, computed from the first stage's `sums`."""
        return _sum(self.ordered(sums)) / self._divisors()[-1]

    def _divisors(self) -> tuple[float, float, float]:
        """Return the divisors for each part, for each first-stage sum, and for the second stage's sum."""
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
