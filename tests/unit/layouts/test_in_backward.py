"""Hooks that update parameters during backward."""

from __future__ import annotations

from itertools import pairwise

import torch

from equivcheck.layouts.base.execution.in_backward import update_in_backward
from equivcheck.scenario import Data, Layer, Model, Training
from equivcheck.training.loop import single_device_setup, train

TRAINING = Training(model=Model(features=3, layers=(Layer(width=5), Layer(width=2))), data=Data(microbatches=(4, 4)), steps=2)


def test_a_parameter_is_updated_before_earlier_layers_get_gradients() -> None:
    """When the last microbatch's backward reaches layer 0, layer 1 has a new value and no gradient."""
    setup = single_device_setup(TRAINING)
    update_in_backward(setup)
    first, last = (setup.model.get_parameter(f"layers.{index}.linear.weight") for index in (0, 1))
    values, gradients = [last.detach().clone()], []

    def look(_gradient: torch.Tensor) -> None:
        values.append(last.detach().clone())
        gradients.append(last.grad is None)

    first.register_hook(look)  # type: ignore[no-untyped-call]
    train(setup)
    changed = [not torch.equal(before, after) for before, after in pairwise(values)]
    assert changed == gradients == [False, True, False, True]


def test_a_trace_is_that_of_updates_after_backward() -> None:
    """The loop reads the gradients that hooks used."""
    setup = single_device_setup(TRAINING)
    update_in_backward(setup)
    expected, found = train(single_device_setup(TRAINING)), train(setup)
    for before, after in zip(expected.steps, found.steps, strict=True):
        assert (before.gradients.values == after.gradients.values).all()
        assert (before.parameters.values == after.parameters.values).all()
