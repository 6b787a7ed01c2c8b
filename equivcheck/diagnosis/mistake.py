"""Mistakes as possible explanations for a divergence, and facts about a training on which they depend."""

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
    """Protocol for a function that builds emulated ranks. With `one`, only rank 0 trains."""

    def __call__(self, *, own_rows: bool, one: bool = False) -> EmulatedRanks:
        """Build ranks with their own rows, or with all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about a training, measured by emulating correct ranks."""

    own_rows: bool
    """Whether ranks that compute on their own rows and average gradients give the same as one device with all rows."""
    num_backward: int
    """Number of backward passes in a step."""
    clips: bool
    """Whether a step clips with `torch.nn.utils.clip_grad_norm_` or `clip_grads_with_norm_`."""
    differs: bool
    """Whether ranks that compute on their own rows give other values than one device."""
    updates_in_backward: bool = False
    """Whether an optimizer steps inside backward, so that several emulated ranks cannot reduce gradients."""


@dataclass(frozen=True, slots=True)  # positional, because the catalogue builds hundreds
class Mistake:
    """A mistake that may explain a divergence. It can be tried on emulated ranks."""

    cause: Cause
    """The mistake, as a code for programs."""
    sentence: str
    """The mistake in a sentence, without a full stop."""
    change: Change
    """Function for making the mistake on emulated ranks."""
    own_rows: bool = False
    """Whether each rank must compute on its own rows, even if all rows would give the same result."""
    is_quick: bool = False
    """Whether the mistake is the same on all ranks, so that one training reproduces it."""
    scales_gradients: bool = False
    """Whether the mistake only multiplies each gradient on each rank by a factor."""

    def run(self, emulate: Emulate, num_steps: int, facts: StepFacts) -> tuple[Trace, ...]:
        """Train emulated ranks with the mistake, for `num_steps` steps.

        Returns a trace for each rank, or one for all ranks if one is enough.
        """
        emulated = emulate(own_rows=(facts.own_rows and not self.is_quick) or self.own_rows, one=self.is_quick)
        emulated.num_backward = facts.num_backward
        self.change(emulated)
        return emulated.train(num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The steps in which a mistake occurs."""

    first: int
    """First of these steps."""
    last: int | None = None
    """Last of these steps; None if all later steps are wrong, too."""

    def __contains__(self, step: int) -> bool:
        return step >= self.first and (self.last is None or step <= self.last)

    @property
    def words(self) -> str:
        """Ending for a sentence, such as ``, at step 2 only``. Empty if all steps are wrong."""
        if self.last is not None:
            return f", at step {self.first} only"
        return f", from step {self.first} on" if self.first else ""


def spans(diverged: Evidence) -> tuple[Span, ...]:
    """Return the steps in which a mistake may occur: from the first difference on, or only at that step."""
    first = diverged.first.step
    single = (Span(first=first, last=first),) if first < diverged.num_steps - 1 else ()
    return (Span(first=first), *single)
