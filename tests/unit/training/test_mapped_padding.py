"""Tests that torch's bug with `padding_idx` under `torch.vmap` still exists, and that copies avoid it."""

from __future__ import annotations

import numpy as np
import torch

from equivcheck.scenario import SGD, CrossEntropy, Data, Head, Layer, Model, Tokens, Training
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.ensemble import train_ensemble
from equivcheck.training.material import Batch, material
from unit.training.upstream.mapped_embedding_padding import max_difference

FORGETS_PADDING = ">=2.9"
"""Versions with the bug, measured on 2.9.1, 2.13.0 and 2.15.0."""


def test_backward_from_outside_forgets_the_padding() -> None:
    """The padding row has a gradient in all copies except the first; inside `torch.func.grad` it has none."""
    assert (max_difference() > 0) == is_torch_in(FORGETS_PADDING)
    assert max_difference(inside=True) == 0


def test_copies_honour_the_padding() -> None:
    """No copy trains the padding row."""
    model = Model(features=2, length=4, source=Tokens(vocabulary=3, padding=1), layers=(Layer(width=2),), head=Head())
    training = Training(model=model, data=Data(microbatches=(3,)), optimizer=SGD(), loss=CrossEntropy())
    drawn = material(training)
    assert (drawn.steps[0][0].inputs == 1).any()

    def copies(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values] * 3)

    steps = [[Batch(inputs=copies(b.inputs), targets=copies(b.targets), masks=b.masks) for b in step] for step in drawn.steps]
    found = train_ensemble(training, {name: copies(values) for name, values in drawn.parameters.items()}, steps)
    names = list(drawn.parameters)
    start = sum(drawn.parameters[name].numel() for name in names[: names.index("embedding.weight")])
    rows = found.steps[0].gradients[:, start : start + 6].reshape(3, 3, 2)
    assert np.count_nonzero(rows[:, 1]) == 0
    assert np.count_nonzero(rows[:, [0, 2]]) == 12
