"""Tests that copies trained one by one equal copies trained in one pass."""

import numpy as np
import torch

from equivcheck.scenario import Adam, ClipNorm, Data, Layer, Model, Training
from equivcheck.training.copies import train_copies
from equivcheck.training.ensemble import train_ensemble
from equivcheck.training.material import Batch, material

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=4, dropout=0.5), Layer(width=2))),
    data=Data(microbatches=(3, 1)),
    optimizer=Adam(),
    clipping=ClipNorm(max_norm=0.1),
    steps=3,
)


def scaled(values: torch.Tensor) -> torch.Tensor:
    """Three different copies."""
    return torch.stack([values, values * 1.5, values * 0.5])


def test_copies_in_turn_equal_copies_at_once() -> None:
    """Both functions return the same numbers in the same layout."""
    drawn = material(TRAINING)
    parameters = {name: scaled(values) for name, values in drawn.parameters.items()}
    steps = [[Batch(inputs=scaled(b.inputs), targets=scaled(b.targets), masks=b.masks) for b in step] for step in drawn.steps]
    one, other = train_copies(TRAINING, parameters, steps), train_ensemble(TRAINING, parameters, steps)
    assert one.state_names == other.state_names
    np.testing.assert_allclose(one.state, other.state, rtol=1e-9, atol=1e-15)
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        assert ours.present == theirs.present
        for name in ("loss", "gradients", "clip_norm", "clipped", "parameters"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-9, atol=1e-15)
