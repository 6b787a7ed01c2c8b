"""Gradient clipping between backward and the optimizer step."""

from __future__ import annotations

from equivcheck.scenario.noun import frozen_dataclass, require_positive
from equivcheck.system.choice import PrintableEnum


class NormType(PrintableEnum):
    """Order p of the vector norm over all gradients."""

    ONE = "1"
    TWO = "2"
    INF = "inf"


@frozen_dataclass
class ClipNorm:
    """Scale all gradients so that their total norm is at most `max_norm`, like `torch.nn.utils.clip_grad_norm_`."""

    max_norm: float = 0.1
    """Largest norm that stays unscaled, above 0."""
    norm_type: NormType = NormType.TWO
    """Order p of the norm: 1, 2 or infinity."""

    def __post_init__(self) -> None:
        require_positive(self, "max_norm")


@frozen_dataclass
class ClipValue:
    """Clamp each gradient element to at most `clip_value` in absolute value, like `torch.nn.utils.clip_grad_value_`."""

    clip_value: float = 0.1
    """Largest absolute value that stays unclamped, above 0."""

    def __post_init__(self) -> None:
        require_positive(self, "clip_value")


Clipping = ClipNorm | ClipValue
