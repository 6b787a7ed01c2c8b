"""Element types that a layout computes or communicates in instead of the training's own."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import noun
from equivcheck.system.choice import Choice


class ElementType(Choice):
    """A floating-point type, by its name in torch."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LowPrecision(Choice):
    """What `torch.autocast` can cast to."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Compression(Choice):
    """Which hook of `torch.distributed.algorithms.ddp_comm_hooks.default_hooks` compresses gradients for their reduction."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


@noun
class MixedPrecision:
    """What fully sharded data parallelism casts; the parameters that the optimizer steps keep the training's precision."""

    param: ElementType | None = None
    """What parameters and inputs are cast to for forward and backward; None leaves them."""
    reduce: ElementType | None = None
    """What gradients are reduced in; None for the type that they are computed in, or that of parameters under `fully_shard` of
    torch 2.15 and later."""
    output: ElementType | None = None
    """What the model's output is cast to; None leaves it."""

    def __post_init__(self) -> None:
        if self.param is self.reduce is self.output is None:
            raise InvalidScenario("MixedPrecision has no element type; allowed: at least one of param, reduce, output")
