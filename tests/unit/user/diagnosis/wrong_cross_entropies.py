"""Cross-entropies whose classes are split over ranks, with mistakes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from unit.user.diagnosis.wrong_trainings import Wrong, rank
from unit.user.programs import Total, brought

NUM_CLASSES, SMOOTHING = 6, 0.1


class Predictor(nn.Module):
    """A model that computes its loss. On ranks, the head has a part of the classes."""

    mistake = ""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_CLASSES, 4), nn.Linear(4, NUM_CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean over labels."""
        hidden = self.embedding(tokens).flatten(0, 1)
        if dist.is_initialized():
            return split_loss(self.head(_Copied.apply(hidden)), labels.flatten(), self.mistake)
        return functional.cross_entropy(self.head(hidden), labels.flatten(), label_smoothing=SMOOTHING)


class _Copied(torch.autograd.Function):
    """Identity in forward, sum over ranks in backward."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def _total(part: torch.Tensor) -> torch.Tensor:
    return Total.apply(part, dist.group.WORLD)


def _twice(values: torch.Tensor) -> torch.Tensor:
    """Double the gradient only."""
    return 2 * values - values.detach()


def split_loss(logits: torch.Tensor, labels: torch.Tensor, mistake: str) -> torch.Tensor:
    """Return the loss from this rank's logits."""
    size = logits.shape[-1]
    if mistake == "own maximum":
        logits = logits - logits.detach().amax(-1, keepdim=True)
    own = logits.exp().sum(-1)
    total = (own if mistake == "own denominator" else _total(own)) * (2 if mistake == "counted twice" else 1)
    total = _twice(total) if mistake == "sum twice" else total
    place = labels - rank() * size
    here = (place >= 0) & (place < size)
    part = logits.gather(-1, place.clamp(0, size - 1)[:, None])[:, 0] * here
    picked = part if mistake == "label not summed" else _total(part)
    picked = {"label without gradient": picked.detach(), "label twice": _twice(picked)}.get(mistake, picked)
    mean = logits.mean(-1) if mistake == "own smoothing" else _total(logits.sum(-1)) / NUM_CLASSES
    return (total.log() - (1 - SMOOTHING) * picked - SMOOTHING * mean).mean()


def _predictor(says: str, mistake: str) -> Wrong:
    def parallelize(model: Any, _mesh: DeviceMesh) -> nn.Module:
        model.mistake, model.head.weight = mistake, nn.Parameter(model.head.weight.detach().chunk(2)[rank()].clone())
        return model

    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, NUM_CLASSES, (2, 4, 3), generator=generator) for _ in range(2)]
    return Wrong(
        says=says,
        brought=brought(
            model=Predictor,
            parallelize=parallelize,
            mesh={"tp": 2},
            cuts={"head.weight": ((0, "tp"),)},
            batches=[((tokens, labels), None) for tokens, labels in drawn],
            loss=lambda outputs, _targets: outputs,
        ),
    )


CROSS_ENTROPIES: dict[str, Wrong] = {
    "smoothed_over_own_classes": _predictor("each of the 2 tp ranks smooths labels over its own classes only", "own smoothing"),
    "labels_without_gradient": _predictor("the term with the labels' logits has none", "label without gradient"),
    "sum_of_exponentials_twice": _predictor("the gradient of the log-sum-exp is multiplied by 2, the number", "sum twice"),
    "labels_twice": _predictor("the gradient of the logits of labels is multiplied by 2, the number of tp ranks", "label twice"),
    "classes_counted_twice": _predictor("the softmax counts each class once on each of the 2 tp ranks, so", "counted twice"),
    "own_denominator": _predictor("each of the 2 tp ranks divides by the sum over the exponentials", "own denominator"),
    "own_maximum": _predictor("each of the 2 tp ranks subtracts the maximum of its own logits", "own maximum"),
    "labels_not_summed": _predictor("the logits of labels are not summed over the 2 tp ranks", "label not summed"),
}
"""Mistakes in cross-entropies."""
