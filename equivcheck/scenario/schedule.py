"""Learning rate schedules from `torch.optim.lr_scheduler`, stepped after each optimizer step."""

from __future__ import annotations

from equivcheck.scenario.noun import frozen_dataclass, require_between, require_positive


@frozen_dataclass
class Schedule:
    """Base class for learning rate schedules. Each subclass is named like its class in `torch.optim.lr_scheduler`."""


@frozen_dataclass
class StepLR(Schedule):
    """Options for `torch.optim.lr_scheduler.StepLR`."""

    step_size: int = 1
    """Steps between two decays, 1 to 5."""
    gamma: float = 0.5
    """Factor by which each decay multiplies the learning rate, above 0."""

    def __post_init__(self) -> None:
        require_between(self, "step_size", 1, 5)
        require_positive(self, "gamma")


@frozen_dataclass
class ExponentialLR(Schedule):
    """Options for `torch.optim.lr_scheduler.ExponentialLR`."""

    gamma: float = 0.5
    """Factor by which each step multiplies the learning rate, above 0."""

    def __post_init__(self) -> None:
        require_positive(self, "gamma")


@frozen_dataclass
class LinearLR(Schedule):
    """Options for `torch.optim.lr_scheduler.LinearLR`, which raises the learning rate during the first steps."""

    start_factor: float = 0.25
    """Factor for the learning rate at the first step, above 0, at most 1."""
    total_iters: int = 3
    """Steps until the learning rate reaches its full value, 1 to 5."""

    def __post_init__(self) -> None:
        require_positive(self, "start_factor")
        require_between(self, "start_factor", 0.0, 1.0)
        require_between(self, "total_iters", 1, 5)


@frozen_dataclass
class CosineAnnealingLR(Schedule):
    """Options for `torch.optim.lr_scheduler.CosineAnnealingLR`."""

    T_max: int = 5
    """Steps in half a period, 1 to 10."""

    def __post_init__(self) -> None:
        require_between(self, "T_max", 1, 10)


SCHEDULES: tuple[type[Schedule], ...] = (StepLR, ExponentialLR, LinearLR, CosineAnnealingLR)
"""All schedules, simplest first."""
