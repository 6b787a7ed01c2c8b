"""Setup for a single device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equivcheck.scenario import Training
from equivcheck.training.accumulate import accumulate
from equivcheck.training.material import material
from equivcheck.training.model import build_model
from equivcheck.training.setup import Setup


def single_device_setup(training: Training, parameters: Mapping[str, torch.Tensor] | None = None) -> Setup:
    """Setup for the single-device run, with the training's own initial parameters unless others are given."""
    initial = material(training).parameters if parameters is None else parameters
    model = build_model(training.model, initial, training.data.batch_dim)
    return Setup(training=training, model=model, module=model, compute=accumulate)
