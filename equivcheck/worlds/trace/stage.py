"""Training stages. The train loop announces them so that recorded calls carry them."""

from __future__ import annotations

from equivcheck.system.choice import PrintableEnum


class Stage(PrintableEnum):
    """Part of a step in which a rank makes a collective call, in step order."""

    SETUP = "setup"
    """Building the model, the layout and the optimizer, before the first step."""
    COMPUTE = "compute"
    """Forward and backward of all microbatches."""
    CLIPPING = "clipping"
    """Gradient clipping."""
    UPDATE = "update"
    """Optimizer step."""
    READING = "reading"
    """Reading values for the trace, which is not part of the training."""
