"""The stages of a training, as the train loop announces them to whoever records what a rank communicates."""

from __future__ import annotations

from equivcheck.system.choice import Choice


class Stage(Choice):
    """What a rank is doing, in the order of a step."""

    SETUP = "setup"
    """Building the model, the layout and the optimizer, before the first step."""
    COMPUTE = "compute"
    """Forward and backward of all microbatches."""
    CLIPPING = "clipping"
    """Clipping of gradients."""
    UPDATE = "update"
    """The optimizer's step."""
    READING = "reading"
    """Reading values for the trace: no part of the training."""
