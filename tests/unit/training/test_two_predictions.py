"""Tests of heads that predict two tokens, on one device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from equivcheck.scenario import CrossEntropy, Data, Head, IgnoredLabels, Layer, Model, Normaliser, Tokens, Training
from equivcheck.training.labels import IGNORED, labels_of
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material


def a_training(*, document_length: int | None = None, batch_dim: int = 0, loss: CrossEntropy) -> Training:
    """Two microbatches of sequences with five positions."""
    model = Model(
        features=2,
        length=5,
        document_length=document_length,
        source=Tokens(vocabulary=4),
        layers=(Layer(width=2),),
        head=Head(predicts_two=True),
    )
    return Training(model=model, data=Data(microbatches=(4, 3), batch_dim=batch_dim), loss=loss, seed=2)


@pytest.mark.parametrize("document_length", [None, 3])
@pytest.mark.parametrize("ignored", [IgnoredLabels.NONE, IgnoredLabels.SOME])
def test_the_loss_is_the_mean_of_both_predictions_means(ignored: IgnoredLabels, document_length: int | None) -> None:
    """Each prediction's loss is divided by its own counted labels over all microbatches."""
    training = a_training(document_length=document_length, loss=CrossEntropy(ignored=ignored))
    outputs, labels = [], []
    for batch in material(training).steps[0]:
        outputs.append(single_device_setup(training).module(batch.inputs, batch.masks, 0).detach())
        labels.append(labels_of(batch.targets))
    means = [
        functional.cross_entropy(torch.cat(outputs)[..., place, :].flatten(0, 1), torch.cat(labels)[..., place].flatten())
        for place in (0, 1)
    ]

    assert train(single_device_setup(training)).steps[0].loss == pytest.approx(float(sum(means)) / 2, rel=1e-12)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_the_second_prediction_has_the_label_of_the_next_position(batch_dim: int) -> None:
    """The last position, and the last one in each document, has no second label."""
    for batch in material(a_training(document_length=3, batch_dim=batch_dim, loss=CrossEntropy())).steps[0]:
        first, second = labels_of(batch.targets).transpose(0, batch_dim).unbind(-1)
        assert (second[:, [0, 3]] == first[:, [1, 4]]).all()
        assert (second[:, [1, 2, 4]] == IGNORED).all()
        assert (first[:, [0, 1, 3, 4]] != IGNORED).all()


@pytest.mark.parametrize("loss", [CrossEntropy(summed=True), CrossEntropy(per=Normaliser.SEQUENCE)], ids=repr)
def test_sums_and_means_over_sequences_have_two_predictions_as_well(loss: CrossEntropy) -> None:
    """The loss is the sum over all labels, or the mean of both predictions' means over sequences."""
    training = a_training(loss=loss)
    total = count = 0.0
    for batch in material(training).steps[0]:
        outputs = single_device_setup(training).module(batch.inputs, batch.masks, 0).detach()
        for place in (0, 1):
            reduction = "sum" if loss.summed else "mean"
            rows = zip(outputs[..., place, :], labels_of(batch.targets)[..., place], strict=True)
            total += sum(float(functional.cross_entropy(row, labels, reduction=reduction)) for row, labels in rows)
            count += len(outputs)

    expected = total if loss.summed else total / count
    assert train(single_device_setup(training)).steps[0].loss == pytest.approx(expected, rel=1e-12)
