"""Gradient clipping between backward and update."""

from __future__ import annotations

from equivcheck.scenario.noun import noun, require_positive
from equivcheck.system.choice import Choice


class NormType(Choice):
    """The vector norm over all gradients."""

    ONE = "1"
    TWO = "2"
    INF = "inf"


@noun
class ClipNorm:
    """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""

    max_norm: float = 0.1
    """Largest norm left as it is, above 0."""
    norm_type: NormType = NormType.TWO
    """Which norm."""

    def __post_init__(self) -> None:
        require_positive(self, "max_norm")


@noun
class ClipValue:
    """Clamp each gradient element, as `torch.nn.utils.clip_grad_value_` does."""

    clip_value: float = 0.1
    """Largest magnitude left as it is, above 0."""

    def __post_init__(self) -> None:
        require_positive(self, "clip_value")


Clipping = ClipNorm | ClipValue
