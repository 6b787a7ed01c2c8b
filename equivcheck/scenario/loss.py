"""What is minimised: a loss of real targets, or of labels."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.noun import noun, require_between, require_not_negative
from equivcheck.system.choice import Choice

MAX_LABEL_SMOOTHING = 0.9


class Loss(Choice):
    """A loss of real targets; means are over all elements of the step's whole batch."""

    MSE_MEAN = "mse_mean"
    MSE_SUM = "mse_sum"
    LINEAR_MEAN = "linear_mean"
    LINEAR_SUM = "linear_sum"

    @property
    def is_mean(self) -> bool:
        """Whether the loss is averaged over the batch rather than summed."""
        return self in (Loss.MSE_MEAN, Loss.LINEAR_MEAN)

    @property
    def is_linear(self) -> bool:
        """Whether the loss is of ``out - target`` rather than of its square."""
        return self in (Loss.LINEAR_MEAN, Loss.LINEAR_SUM)


class Ignored(Choice):
    """Which labels do not count; one of a step's always does."""

    NONE = "none"
    SOME = "some"
    """Each with a probability of a third."""
    FIRST_ROWS = "first_rows"
    """Those of the first half of the rows of each microbatch: the first data ranks may have none that counts."""
    FIRST_MICROBATCH = "first_microbatch"
    """All of the first microbatch, where there are several."""


@noun
class CrossEntropy:
    """The cross-entropy of labels that count, divided by their number in the whole step, all microbatches and ranks together."""

    tag: ClassVar[str] = "cross_entropy"
    is_mean: ClassVar[bool] = False
    """Parts of a step are added up: all are divided by one number, which is known before the first of them."""
    is_linear: ClassVar[bool] = False
    ignored: Ignored = Ignored.NONE
    """Which labels do not count."""
    summed: bool = False
    """Whether it is divided by nothing."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes, 0 to 0.9."""
    class_weights: bool = False
    """Whether classes have weights, from 0.5 to 1.5 in even steps; labels are then counted by them."""
    z_loss: float = 0.0
    """Factor of the square of the logarithm of the sum of exponentials, added for each label that counts; at least 0."""

    def __post_init__(self) -> None:
        require_between(self, "label_smoothing", 0.0, MAX_LABEL_SMOOTHING)
        require_not_negative(self, "z_loss")
