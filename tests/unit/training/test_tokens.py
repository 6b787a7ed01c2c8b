"""Tests of token models on one device against NumPy, and of loss divisors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivcheck.scenario import (
    SGD,
    Activation,
    AnyLayer,
    Attention,
    CrossEntropy,
    Data,
    Experts,
    GatedMLP,
    Head,
    IgnoredLabels,
    LoRALinear,
    Model,
    Norm,
    Precision,
    ScoreFunction,
    Tokens,
    Training,
)
from equivcheck.strategies import cross_entropies, token_models
from equivcheck.training.labels import IGNORED
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material
from equivcheck.worlds.trace.pieces import full_tensors_of
from numpy_reference import tokens
from numpy_reference.labels import count_of, label_loss

DIFFERENCE = 1e-6

DECODER = Model(
    features=4,
    source=Tokens(vocabulary=5, padding=1, learned_positions=True),
    length=3,
    layers=(Attention(num_heads=4, num_kv_heads=2, rotary=True, bias=True, norm=Norm.RMS), GatedMLP(hidden=3, norm=Norm.LAYER)),
    head=Head(tied=True, norm=Norm.RMS),
)


def a_training(model: Model, loss: CrossEntropy, *rows: int) -> Training:
    """One float64 step without dropout."""
    layers = tuple(layer.with_fields(dropout=0.0, frozen=False) for layer in model.layers)
    return Training(
        model=replace(model, layers=layers), data=Data(microbatches=rows or (2, 1)), loss=loss, optimizer=SGD(), seed=3
    )


def numpy_loss(training: Training, parameters: tokens.Parameters) -> float:
    """Loss of the first step."""
    assert isinstance(training.loss, CrossEntropy)
    batches = material(training).steps[0]
    found = [
        (tokens.logits(training.model, parameters, batch.inputs.numpy()), batch.targets.numpy(), batch.divisor)
        for batch in batches
    ]
    loss = _two_losses(training, found) if training.model.predicts_two else _label_loss(training, found) / batches[0].divisor
    added = (
        tokens.balance_loss(training.model, parameters, batch.inputs.numpy()) * batch.rows / training.data.batch
        for batch in batches
    )
    return loss + sum(added)


Outputs = Sequence[tuple[npt.NDArray[np.floating], npt.NDArray[Any], float]]
"""Logits, targets and divisor of each microbatch."""


def _label_loss(training: Training, found: Outputs) -> float:
    assert isinstance(training.loss, CrossEntropy)
    return sum(label_loss(training.loss, logits, targets)[0] for logits, targets, _ in found)


def _two_losses(training: Training, found: Outputs) -> float:
    """The sum of both predictions' losses, or the mean of those that have labels, each divided by its own."""
    loss, means = training.loss, []
    assert isinstance(loss, CrossEntropy)
    for place in (0, 1):
        own = [
            (logits[:, :, place], both[:, :, place] if loss.weighs_labels else both[:, :, place, 0].astype(np.int64), divisor)
            for logits, both, divisor in found
        ]
        count = sum(count_of(loss, training.model.out_features, targets) for _, targets, _ in own)
        if loss.summed or count:
            means.append(_label_loss(training, own) / (1.0 if loss.summed else count))
    return sum(means) / (1 if loss.summed else len(means))


@settings(max_examples=25)
@given(token_models(), cross_entropies())
def test_the_loss_is_that_of_numpy(model: Model, loss: CrossEntropy) -> None:
    """The loss equals NumPy's for generated embeddings, attention, MLPs, heads and label losses."""
    training = a_training(model, loss) if model.out_features > 1 else a_training(DECODER, loss)
    parameters = {name: values.numpy() for name, values in material(training).parameters.items()}
    assert train(single_device_setup(training)).steps[0].loss == pytest.approx(
        numpy_loss(training, parameters), rel=1e-10, abs=1e-12
    )


ATTENTION, GATED = DECODER.layers
SCORED = Experts(
    hidden=2, num_experts=3, top_k=2, scores=ScoreFunction.SIGMOID, normalised=True, weighs_input=True, bias=True, balance=0.5
)
SHARED = Experts(hidden=3, num_experts=4, shared=True, norm=Norm.RMS, activation=Activation.TANH, balance=1.0)


@pytest.mark.parametrize(
    "layers",
    [
        (ATTENTION, GATED),
        (ATTENTION.with_fields(fused=True), GATED),
        (SCORED, SHARED),
        (SCORED.with_fields(dispatched=True), SHARED.with_fields(dispatched=True)),
        (LoRALinear(rank=2, alpha=3.0), LoRALinear(rank=3, residual=False)),
    ],
    ids=["explicit", "fused", "experts", "dispatched", "adapters"],
)
def test_gradients_are_differences_of_the_loss_of_numpy(layers: tuple[AnyLayer, ...]) -> None:
    """Each gradient equals a finite difference. The padding row has none except through a tied head."""
    model = replace(DECODER, layers=layers, head=Head())
    training = a_training(model, CrossEntropy(ignored=IgnoredLabels.SOME, label_smoothing=0.1, z_loss=0.1, class_weights=True))
    parameters = {name: values.numpy() for name, values in material(training).parameters.items()}
    gradients = train(single_device_setup(training)).steps[0].gradients
    for name, found in full_tensors_of(gradients).items():
        for place in np.ndindex(*found.shape):
            moved = []
            for sign in (1.0, -1.0):
                values = parameters[name].copy()
                values[place] += sign * DIFFERENCE
                moved.append(numpy_loss(training, {**parameters, name: values}))
            is_padding = name == "embedding.weight" and place[0] == 1
            expected = 0.0 if is_padding else (moved[0] - moved[1]) / (2.0 * DIFFERENCE)
            assert found[place] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, place)


@given(st.sampled_from(IgnoredLabels), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_a_loss_is_divided_by_the_labels_of_the_whole_step(
    ignored: IgnoredLabels, rows: list[int], summed: bool, seed: int
) -> None:
    """All microbatches have the same divisor: the labels kept in the whole step, at least one."""
    training = replace(a_training(DECODER, CrossEntropy(ignored=ignored, summed=summed), *rows), seed=seed)
    (batches,) = material(training).steps
    counted = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    assert counted >= 1
    assert {batch.divisor for batch in batches} == {1.0 if summed else float(counted)}


@pytest.mark.parametrize("precision", Precision)
def test_labels_that_do_not_count_are_where_the_noun_says(precision: Precision) -> None:
    """Labels in the first rows, or in the first microbatch, are ignored."""
    training = replace(a_training(DECODER, CrossEntropy(ignored=IgnoredLabels.FIRST_ROWS), 4, 2), precision=precision)
    ((first, second),) = material(training).steps
    assert [(batch.targets == IGNORED).all(1).tolist() for batch in (first, second)] == [
        [True, True, False, False],
        [True, False],
    ]
    ((first, second),) = material(replace(training, loss=CrossEntropy(ignored=IgnoredLabels.FIRST_MICROBATCH))).steps
    assert (first.targets == IGNORED).all()
    assert not (second.targets == IGNORED).any()
