"""Finds constant factors in gradients, which no comparison between arrangements shows.

If the loss is a cross-entropy, the gradient of the logits is a token's weight times the difference between probabilities and
label. The gradients therefore contain the weights, and a declared normaliser must give these weights.
"""

from __future__ import annotations

import torch

from equivcheck.arrangements.arrangement import Arrangement
from equivcheck.arrangements.fields import Role
from equivcheck.arrangements.format import Format
from equivcheck.arrangements.rows import Example
from equivcheck.batching.normalisers import Normaliser
from equivcheck.batching.runs import Runs


def constant_factor(runs: Runs, given: Format, declared: Normaliser, window: int | None) -> float:
    """Return the factor between the step's gradients and the gradients for a cross-entropy with the normaliser `declared`.

    `given` describes the batch's tensors. Returns 1 if examples have different factors, if the loss is not a cross-entropy, or if
    the batch has weights.
    """
    if any(given.tensor(field).is_floating_point() for field in given.fields) or given.field_with(Role.LABELS) is None:
        return 1.0
    factors: list[float] = []
    for example, arrangement in zip(runs.examples, runs.singles, strict=True):
        weight = _weight_of_cross_entropy(runs, given, example, arrangement)
        expected = declared.weights(arrangement, window)[id(example)]
        if weight is None or not expected:
            return 1.0
        factors.append(weight / expected)
        if runs.is_one(factors[-1]) or not runs.is_one(factors[-1] / factors[0]):
            return 1.0
    return factors[0]


def _weight_of_cross_entropy(runs: Runs, given: Format, example: Example, arrangement: Arrangement) -> float | None:
    """Return each counted token's weight. None if the only output's gradient is not that of a cross-entropy."""
    found, labels = runs.observation(arrangement), given.field_with(Role.LABELS)
    assert labels is not None
    if len(found.names) != 1:
        return None
    (logits,), (gradient,), targets = found.finals[id(example)], found.gradients[id(example)], example.values[labels]
    if logits.dim() != 2 or targets.dim() != 1 or len(logits) != len(targets):
        return None
    if given.is_shifted_by_model:
        logits, gradient, targets, rest = logits[:-1], gradient[:-1], targets[1:], gradient[-1]
        if bool(rest.any()):
            return None
    counted = (targets != given.ignore_index).unsqueeze(1)
    classes = targets.where(counted.squeeze(1), torch.zeros_like(targets))
    if int(classes.max()) >= logits.shape[1] or int(classes.min()) < 0:
        return None
    expected = (logits.double().softmax(1) - torch.nn.functional.one_hot(classes, logits.shape[1])) * counted
    weight = float((gradient * expected).sum() / expected.square().sum())
    is_multiple = float((gradient - weight * expected).norm()) <= runs.rounding * float(gradient.norm())
    return weight if is_multiple else None
