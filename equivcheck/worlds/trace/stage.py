"""Stages of a training. The train loop announces each stage, and recorded calls name it."""

from __future__ import annotations

from equivcheck.system.choice import PrintableEnum


class Stage(PrintableEnum):
    """Stage of a training, in chronological order. Each recorded communication call has the stage in which a rank made it."""

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
