"""The batch for each training step."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import frozen_dataclass, require_between, short_repr

MAX_MICROBATCHES = 4
MAX_ROWS = 2**16
"""Maximum rows per microbatch. The number is large because a dry run may use thousands of ranks."""
USUAL_ROWS = 64
"""Maximum rows per microbatch in generated scenarios."""


@frozen_dataclass
class Data:
    """Rows that one step consumes on all ranks together, drawn from the training's seed."""

    tag: ClassVar[str] = "rows"
    microbatches: tuple[int, ...]
    """Rows in each microbatch, 1 to 65,536. A step has 1 to 4 microbatches, whose gradients accumulate before the optimizer step.
    """
    last_window: int | None = None
    """Maximum microbatches, 1 to 4, in the last step (a trailing accumulation window). It has no effect if the training has a
    single step. None for no maximum.
    """
    batch_dim: int = 0
    """Batch dim in inputs, outputs and targets, 0 or 1. With 1 the model transposes its input and its output."""

    def __post_init__(self) -> None:
        require_between(self, "batch_dim", 0, 1)
        if self.last_window is not None:
            require_between(self, "last_window", 1, MAX_MICROBATCHES)
        if not 1 <= len(self.microbatches) <= MAX_MICROBATCHES:
            raise InvalidScenario(
                f"Data.microbatches of length {len(self.microbatches)} is not valid. Expected 1 to {MAX_MICROBATCHES} entries."
            )
        for rows in self.microbatches:
            if not 1 <= rows <= MAX_ROWS:
                raise InvalidScenario(f"Data.microbatches entry {short_repr(rows)} is not valid. Expected 1 to {MAX_ROWS} rows.")

    @property
    def batch(self) -> int:
        """Rows in a step, added up over its microbatches. The last step may have fewer microbatches (`last_window`)."""
        return sum(self.microbatches)

    def has_trailing_window(self, steps: int) -> bool:
        """Whether the last of `steps` steps has fewer microbatches than the steps before it."""
        return steps > 1 and self.last_window is not None and self.last_window < len(self.microbatches)

    def microbatches_at(self, step: int, steps: int) -> tuple[int, ...]:
        """Rows in each microbatch of the step with index `step`, in a training with `steps` steps."""
        is_trailing = self.has_trailing_window(steps) and step == steps - 1
        return self.microbatches[: self.last_window] if is_trailing else self.microbatches
