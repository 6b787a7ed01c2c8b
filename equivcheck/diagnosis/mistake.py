"""Candidate mistakes, and the facts about a training they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Trace

COMPUTED = (Phase.LOSS, Phase.GRADIENT)
"""Phases before an update."""
UPDATED = (Phase.UPDATE, Phase.STATE)
"""Phases of an update."""
FACTORS = (Cause.SCALED, Cause.NOT_UNSCALED)
"""Causes that stand for any constant factor. Such causes are dropped if another cause also fits."""
Change = Callable[[Any], None]
"""Function to plant a mistake in correctly emulated ranks.
Some mistakes need attributes that only one kind of emulated ranks has."""


class Emulate(Protocol):
    """Function that builds emulated ranks. With `one`, only rank 0 trains."""

    def __call__(self, *, own_rows: bool, one: bool = False) -> EmulatedRanks:
        """Build ranks with their own rows, or with all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about a training, measured by emulating correct ranks."""

    own_rows: bool
    """Whether ranks with their own rows, averaged, compute the same as one device with all rows."""
    num_backward: int
    """Backward passes per step."""
    clips: bool
    """Whether a step clips with `torch.nn.utils.clip_grad_norm_` or `clip_grads_with_norm_`."""
    differs: bool
    """Whether ranks with their own rows compute something else than one device."""
    updates_in_backward: bool = False
    """Whether an optimizer steps inside backward, so that several emulated ranks cannot reduce gradients."""


@dataclass(frozen=True, slots=True)  # positional, because the catalogue builds hundreds
class Mistake:
    """A mistake that may explain a divergence."""

    cause: Cause
    """Short name for the mistake."""
    sentence: str
    """Sentence about the mistake, without a full stop."""
    change: Change
    """Function to apply the mistake to emulated ranks."""
    own_rows: bool = False
    """Whether each rank must compute on its own rows, even if all rows would give the same result."""
    is_quick: bool = False
    """Whether the mistake is equal on all ranks, so one training reproduces it."""
    scales_gradients: bool = False
    """Whether each rank only multiplies each of its gradients by a factor."""

    def run(self, emulate: Emulate, num_steps: int, facts: StepFacts) -> tuple[Trace, ...]:
        """Train emulated ranks with the mistake. Returns one trace per rank, or one for all ranks if a single rank is enough."""
        emulated = emulate(own_rows=(facts.own_rows and not self.is_quick) or self.own_rows, one=self.is_quick)
        emulated.num_backward = facts.num_backward
        self.change(emulated)
        return emulated.train(num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of steps in which a mistake occurs."""

    first: int
    """First step."""
    last: int | None = None
    """Last step; None for all later steps."""

    def __contains__(self, step: int) -> bool:
        return step >= self.first and (self.last is None or step <= self.last)

    @property
    def words(self) -> str:
        """Suffix for a sentence: ``, at step 2 only``; empty if the range covers every step."""
        if self.last is not None:
            return f", at step {self.first} only"
        return f", from step {self.first} on" if self.first else ""


def spans(diverged: Evidence) -> tuple[Span, ...]:
    """Return the step ranges that agree with the first difference."""
    first = diverged.first.step
    single = (Span(first=first, last=first),) if diverged.num_steps > 1 else ()
    return (Span(first=first), *single)
