"""How each rank executes a step: compilation, activation checkpointing, and updates in backward.

Results must not depend on these options.
"""

from __future__ import annotations

from equivcheck.scenario.noun import frozen_dataclass, invalid_field
from equivcheck.system.choice import PrintableEnum


class Compile(PrintableEnum):
    """Backend for `torch.compile`. The model is compiled after the layout has wrapped it.

    Both backends use AOTAutograd, so they also compile the backward graph.
    """

    NONE = "none"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"


class Checkpointing(PrintableEnum):
    """Layers to which activation checkpointing applies.

    Such a layer keeps no activations and runs its forward again during backward.
    """

    NONE = "none"
    ODD_LAYERS = "odd_layers"
    EVERY_LAYER = "every_layer"
    SELECTIVE = "selective"
    """Every layer, except that the results of its matrix products are kept (`create_selective_checkpoint_contexts`)."""
    OFFLOAD = "offload"
    """No layer runs again; instead all layers keep the tensors that backward needs in host memory (`save_on_cpu`)."""


KEPT_PRODUCTS = ("mm", "addmm", "bmm")
"""Operations in `torch.ops.aten` whose results `Checkpointing.SELECTIVE` keeps."""


@frozen_dataclass
class Execution:
    """How ranks execute a step: compilation, checkpointing, and whether the optimizer updates parameters during backward."""

    compile: Compile = Compile.NONE
    """Backend for `torch.compile` on the model, or on each layer if `per_layer` is set."""
    per_layer: bool = False
    """Whether each layer is compiled separately, once per input shape, instead of the model. Only with `compile`."""
    compiled_autograd: bool = False
    """Whether compiled autograd compiles the whole backward pass, with the same backend (``aot_eager`` if `compile` is off)."""
    checkpointing: Checkpointing = Checkpointing.NONE
    """Activation checkpointing for no layer, for layers 1, 3, 5 and so on, or for every layer; or activation offload."""

    whole_step: bool = False
    """Whether forward, loss, backward, clipping and optimizer update are traced into one graph for each rank to run."""
    optimizer_in_backward: bool = False
    """Whether each parameter has an optimizer of its own, which updates it in a hook as soon as its gradient is complete
    (`register_post_accumulate_grad_hook`).

    The last microbatch updates. The single-device run updates after backward."""

    def __post_init__(self) -> None:
        if self.whole_step and self.is_compiled:
            raise invalid_field(self, "whole_step", "False if compile or compiled_autograd is set")
        if self.per_layer and self.compile is Compile.NONE:
            raise invalid_field(self, "per_layer", "False if compile is Compile.NONE")

    @property
    def is_compiled(self) -> bool:
        """Whether forward or backward is compiled. Such layouts need processes because threads share the compiler's state."""
        return self.compile is not Compile.NONE or self.compiled_autograd

    def checkpoints(self, index: int) -> bool:
        """Whether the layer at this index uses activation checkpointing."""
        return self.checkpointing in (Checkpointing.EVERY_LAYER, Checkpointing.SELECTIVE) or (
            self.checkpointing is Checkpointing.ODD_LAYERS and index % 2 == 1
        )
