"""Cross-entropy with vocabulary-parallel logits: each rank has its own classes' logits.

As in Megatron-LM (https://arxiv.org/abs/1909.08053, section 3), the maximum and the sums over classes are reduced over ranks.
Each rank computes its own logits' gradient.
"""

from __future__ import annotations

import torch

from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import REDUCE_PARTIAL
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.labels import IGNORED, class_weights, labels_of, weights_of
from equivcheck.training.setup import Setup


def compute_sharded_loss(setup: Setup, ranks: AxisRanks) -> None:
    """Replace the setup's loss function by one for vocabulary-parallel logits. Each rank holds the logits for some classes."""
    num_classes = setup.training.model.out_features

    def loss(training: Training, logits: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        assert isinstance(training.loss, CrossEntropy), "a limit leaves no other"
        parts = _Parts(training.loss, ranks, num_classes, logits.flatten(0, -2), targets)
        return parts.total() / divisor

    if ranks.size > 1:
        setup.loss = loss


class _Parts:
    """Logits with shape (rows, own classes), and targets with a label for each row."""

    def __init__(
        self, loss: CrossEntropy, ranks: AxisRanks, num_classes: int, logits: torch.Tensor, targets: torch.Tensor
    ) -> None:
        self.loss, self.ranks, self.num_classes, self.logits = loss, ranks, num_classes, logits
        self.labels, weights = labels_of(targets).flatten(), weights_of(targets)
        self.counts = self.labels != IGNORED
        if weights is not None:
            self.counts = self.counts * weights.flatten()
        self.weights = class_weights(num_classes, logits.dtype) if loss.class_weights else logits.new_ones(num_classes)

    def total(self) -> torch.Tensor:
        """Return the loss, summed over all counted labels. All ranks return the same value."""
        largest = self.ranks.maximum(torch.cat([self.logits.detach(), self._column(-torch.inf)], -1).amax(-1))
        sums = [(self.logits - largest.unsqueeze(-1)).exp().sum(-1), self._of_labels()]
        if self.loss.label_smoothing:
            sums.append((self.logits * self.ranks.own_part(self.weights, 0)).sum(-1))
        exponentials, labelled, *weighted = self.ranks.move(torch.stack(sums), REDUCE_PARTIAL)
        log_sum = exponentials.log() + largest
        losses = (log_sum - labelled) * self.weights[self.labels.clamp(min=0)]
        if weighted:
            spread = (log_sum * self.weights.sum() - weighted[0]) / self.num_classes
            losses = (1 - self.loss.label_smoothing) * losses + self.loss.label_smoothing * spread
        if self.loss.z_loss:
            losses = losses + self.loss.z_loss * log_sum.square()
        total: torch.Tensor = (losses * self.counts).sum()
        return total

    def _of_labels(self) -> torch.Tensor:
        """Return each label's logit if this rank has its class, else zero."""
        num_own = self.logits.shape[-1]
        own = self.labels - self.ranks.first_index(self.num_classes)
        own = torch.where((own >= 0) & (own < num_own), own, num_own)
        return torch.cat([self.logits, self._column(0.0)], -1).gather(-1, own.unsqueeze(-1)).squeeze(-1)

    def _column(self, value: float) -> torch.Tensor:
        return self.logits.new_full((len(self.logits), 1), value)
