"""The data of a training."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import noun, require_between, shown

MAX_MICROBATCHES = 4
MAX_ROWS = 2**16
"""What a noun allows: a dry run has thousands of ranks."""
USUAL_ROWS = 64
"""What is generated."""


@noun
class Data:
    """What one step consumes, on all ranks together; drawn from the training's seed."""

    tag: ClassVar[str] = "rows"
    microbatches: tuple[int, ...]
    """Rows of each microbatch, 1 to 65,536; 1 to 4 microbatches, whose gradients are accumulated before the optimizer steps."""
    batch_dim: int = 0
    """Which dim of inputs, outputs and targets counts rows, 0 or 1; with 1 the model transposes in and out."""

    def __post_init__(self) -> None:
        require_between(self, "batch_dim", 0, 1)
        if not 1 <= len(self.microbatches) <= MAX_MICROBATCHES:
            raise InvalidScenario(f"Data.microbatches has {len(self.microbatches)} entries; allowed: 1 to {MAX_MICROBATCHES}")
        for rows in self.microbatches:
            if not 1 <= rows <= MAX_ROWS:
                raise InvalidScenario(f"Data.microbatches has one of {shown(rows)} rows; allowed: 1 to {MAX_ROWS}")

    @property
    def batch(self) -> int:
        """Rows of a whole step."""
        return sum(self.microbatches)
