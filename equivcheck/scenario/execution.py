"""How a rank's forward and backward are carried out: nothing of it may change what is computed."""

from __future__ import annotations

from equivcheck.scenario.noun import noun, refuse
from equivcheck.system.choice import Choice


class Compile(Choice):
    """What `torch.compile` makes of the model as a layout has wrapped it; its backward is compiled ahead of time with it."""

    NONE = "none"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"


class Recompute(Choice):
    """Which layers keep no activations and run again in backward."""

    NONE = "none"
    ODD_LAYERS = "odd_layers"
    EVERY_LAYER = "every_layer"


@noun
class Execution:
    """Ways to run the same training."""

    compile: Compile = Compile.NONE
    """Backend of `torch.compile` for the module that is called, or for each layer."""
    per_layer: bool = False
    """Whether each layer is compiled by itself, for each shape anew, rather than what is called; with `compile` only."""
    compiled_autograd: bool = False
    """Whether the backward pass as a whole is compiled, by the same backend (``aot_eager`` if the forward is not compiled)."""
    checkpointing: Recompute = Recompute.NONE
    """Activation checkpointing: of no layer, of layers 1, 3 ..., or of all."""

    whole_step: bool = False
    """Whether forward, loss, backward, clipping and the optimizer's update are traced to one graph, which each rank then runs."""

    def __post_init__(self) -> None:
        if self.whole_step and self.is_compiled:
            raise refuse(self, "whole_step", "only without compile and compiled_autograd")
        if self.per_layer and self.compile is Compile.NONE:
            raise refuse(self, "per_layer", "False with Compile.NONE")

    @property
    def is_compiled(self) -> bool:
        """Whether any of it is compiled, which needs processes: threads share the compiler's state."""
        return self.compile is not Compile.NONE or self.compiled_autograd

    def checkpoints(self, index: int) -> bool:
        """Whether a layer, by its index, keeps no activations, and runs again in backward."""
        return self.checkpointing is Recompute.EVERY_LAYER or (self.checkpointing is Recompute.ODD_LAYERS and index % 2 == 1)
