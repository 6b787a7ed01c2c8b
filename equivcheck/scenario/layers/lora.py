"""The linear layer with a LoRA adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from equivcheck.scenario.layers.base import AnyLayer
from equivcheck.scenario.noun import frozen_dataclass, require_between

MAX_RANK = 32
MAX_ALPHA = 64.0


@frozen_dataclass
class LoRALinear(AnyLayer):
    """Linear with a LoRA adapter: ``residual(base(x) + alpha / rank * lora_b(lora_a(x)))``. It has no biases."""

    tag: ClassVar[str] = "lora"
    rank: int
    """Features between the adapter's two linears, 1 to 32."""
    alpha: float = 1.0
    """The adapter's output is multiplied by `alpha` divided by `rank`, 0 to 64."""
    frozen_base: bool = True
    """Whether the base weight has `requires_grad=False`. The adapter's weights are always trained."""
    residual: bool = True
    """Whether the layer adds its input to its output."""

    def __post_init__(self) -> None:
        require_between(self, "rank", 1, MAX_RANK)
        require_between(self, "alpha", 0.0, MAX_ALPHA)

    @property
    def scale(self) -> float:
        """Factor by which the adapter's output is multiplied."""
        return self.alpha / self.rank

    @property
    def ends_in_linear(self) -> bool:
        """False, because the output is a sum."""
        return False

    def rounded_up(self, multiple: int) -> LoRALinear:
        """Return a copy with the rank rounded up to a multiple of `multiple`.

        If the result exceeds the maximum, `multiple` is used instead, or the maximum if that is smaller.
        """
        rank = -(-self.rank // multiple) * multiple
        return replace(self, rank=rank if rank <= MAX_RANK else min(multiple, MAX_RANK))
