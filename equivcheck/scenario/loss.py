"""Loss functions: regression losses and cross-entropy."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.noun import frozen_dataclass, require_between, require_not_negative
from equivcheck.system.choice import PrintableEnum

MAX_LABEL_SMOOTHING = 0.9


class Loss(PrintableEnum):
    """Loss on real-valued targets. A mean runs over all elements in the step's batch."""

    MSE_MEAN = "mse_mean"
    MSE_SUM = "mse_sum"
    LINEAR_MEAN = "linear_mean"
    LINEAR_SUM = "linear_sum"

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean over the step's batch; otherwise it is a sum."""
        return self in (Loss.MSE_MEAN, Loss.LINEAR_MEAN)

    @property
    def is_linear(self) -> bool:
        """Whether the loss is linear in ``out - target`` instead of quadratic."""
        return self in (Loss.LINEAR_MEAN, Loss.LINEAR_SUM)


class IgnoredLabels(PrintableEnum):
    """Labels that are set to `ignore_index`. At least one label in each step is kept."""

    NONE = "none"
    SOME = "some"
    """Each label is ignored with probability 1/3."""
    FIRST_ROWS = "first_rows"
    """Labels in the first half of each microbatch's rows. The first data-parallel ranks may then have only ignored labels."""
    FIRST_MICROBATCH = "first_microbatch"
    """All labels in the first microbatch, if there are several microbatches."""


class Normaliser(PrintableEnum):
    """Whether a cross-entropy is averaged over all labels at once, or first within each sequence and then over sequences."""

    TOKEN = "token"
    """Mean over all counted labels."""
    SEQUENCE = "sequence"
    """Mean over all rows with a counted label, of each row's mean over its counted labels. A row with several packed documents
    counts once.
    """


@frozen_dataclass
class CrossEntropy:
    """Cross-entropy over all labels in a step, divided by the number of labels that are not ignored.

    With `Normaliser.SEQUENCE`, it is divided by the number of sequences with such labels. All microbatches and ranks use the same
    divisor. It is computed from all labels in the step, before the first forward.
    """

    tag: ClassVar[str] = "cross_entropy"
    is_mean: ClassVar[bool] = False
    """False, because the loss of each microbatch is divided by the same number and the results are added."""
    is_linear: ClassVar[bool] = False
    ignored: IgnoredLabels = IgnoredLabels.NONE
    """Labels that are set to `ignore_index`."""
    per: Normaliser = Normaliser.TOKEN
    """Unit over which the loss is averaged: labels, or sequences with equal weights."""
    row_weights: bool = False
    """Whether rows are weighted, with weights 0.5, 1 and 1.5 in turn. The divisor is then the sum of weights."""
    summed: bool = False
    """Whether the loss stays a sum over labels or sequences, without division."""
    label_smoothing: float = 0.0
    """Fraction of the target that is spread over all classes, 0 to 0.9."""
    class_weights: bool = False
    """Whether classes are weighted, with weights from 0.5 to 1.5. The divisor is then the sum of label weights."""
    z_loss: float = 0.0
    """Coefficient for ``logsumexp(logits) ** 2``, added for each label that is not ignored; at least 0."""

    @property
    def weighs_labels(self) -> bool:
        """Whether each label has its own weight."""
        return self.row_weights or self.per is Normaliser.SEQUENCE

    def __post_init__(self) -> None:
        require_between(self, "label_smoothing", 0.0, MAX_LABEL_SMOOTHING)
        require_not_negative(self, "z_loss")
