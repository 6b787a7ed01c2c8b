"""Lower-precision dtypes in computation and communication."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.system.choice import PrintableEnum


class ElementType(PrintableEnum):
    """Floating-point dtype; the value is its name in torch."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LowPrecision(PrintableEnum):
    """Dtypes that `torch.autocast` supports."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Compression(PrintableEnum):
    """Hook from `torch.distributed.algorithms.ddp_comm_hooks.default_hooks` that compresses gradients."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


@frozen_dataclass
class MixedPrecision:
    """Dtypes for FSDP's mixed precision. The optimizer still updates parameters in the training's precision."""

    param: ElementType | None = None
    """Dtype for parameters and inputs in forward and backward; None for no cast."""
    reduce: ElementType | None = None
    """Dtype for gradient reduction; None for the dtype of the gradients. Under `fully_shard` in torch 2.15 and later, None means
    the parameters' dtype."""
    output: ElementType | None = None
    """Dtype for the model's output; None for no cast."""

    def __post_init__(self) -> None:
        if self.param is self.reduce is self.output is None:
            raise InvalidScenario("MixedPrecision() is not valid. Expected at least one of param, reduce, output.")
