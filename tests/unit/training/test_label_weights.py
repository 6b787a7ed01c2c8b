"""Tests of means over sequences and of weighted rows on one device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from equivcheck.scenario import CrossEntropy, Data, Head, IgnoredLabels, Layer, Model, Normaliser, Tokens, Training
from equivcheck.training.labels import IGNORED, labels_of, weights_of
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import Batch, material

DECODER = Model(features=2, length=5, source=Tokens(vocabulary=4), layers=(Layer(width=2),), head=Head())
WEIGHTS = (0.5, 1.0, 1.5)


def losses_of_rows(training: Training, batch: Batch) -> list[torch.Tensor]:
    """Loss of each counted label, by row."""
    outputs = single_device_setup(training).module(batch.inputs, batch.masks, 0)
    return [
        functional.cross_entropy(row[labels != IGNORED], labels[labels != IGNORED], reduction="none")
        for row, labels in zip(outputs, labels_of(batch.targets), strict=True)
    ]


@pytest.mark.parametrize("row_weights", [False, True])
@pytest.mark.parametrize("ignored", [IgnoredLabels.SOME, IgnoredLabels.FIRST_ROWS])
def test_a_mean_over_sequences_weighs_each_sequence_alike(ignored: IgnoredLabels, row_weights: bool) -> None:
    """The loss is the weighted mean of the means over each row with a counted label, over all microbatches."""
    loss = CrossEntropy(per=Normaliser.SEQUENCE, row_weights=row_weights, ignored=ignored)
    training = Training(model=DECODER, data=Data(microbatches=(4, 3)), loss=loss, seed=2)
    total = count = 0.0
    for batch in material(training).steps[0]:
        for index, losses in enumerate(losses_of_rows(training, batch)):
            weight = WEIGHTS[index % 3] if row_weights else 1.0
            if len(losses):
                total, count = total + weight * float(losses.detach().mean()), count + weight

    assert train(single_device_setup(training)).steps[0].loss == pytest.approx(total / count, rel=1e-12)


def test_plain_labels_have_no_weights() -> None:
    """Labels stay integers unless the loss weighs them."""
    training = Training(model=DECODER, data=Data(microbatches=(2,)), loss=CrossEntropy())
    ((batch,),) = material(training).steps

    assert not batch.targets.is_floating_point()
    assert weights_of(batch.targets) is None
    assert labels_of(batch.targets) is batch.targets
