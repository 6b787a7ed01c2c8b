"""Copies of the reference that move as what an optimizer rounds on its way can move them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from equivcheck.scenario import Training
from equivcheck.train.copies import MakeSetup
from equivcheck.train.setup import Setup
from equivcheck.train.single_device import single_device


def rounding_setup(training: Training) -> MakeSetup:
    """How to set up perturbed copies of a training, the first of which is as it is."""
    if not training.optimizer.rounds_to:
        return single_device
    generator = np.random.default_rng(training.seed)
    num_made = 0

    def make_setup(training: Training, parameters: Mapping[str, torch.Tensor]) -> Setup:
        nonlocal num_made
        setup = single_device(training, parameters)
        if num_made:
            round_in_optimizer(setup, generator)
        num_made += 1
        return setup

    return make_setup


def round_in_optimizer(setup: Setup, generator: np.random.Generator) -> None:
    """Give an optimizer that rounds to fewer digits than the parameters have gradients moved by one unit in the last of those."""
    if not setup.training.optimizer.rounds_to:
        return
    eps = torch.finfo(getattr(torch, setup.training.optimizer.rounds_to)).eps
    build = setup.build_optimizer

    def built(training: Training, named: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        optimizer = build(training, named)
        optimizer.register_step_pre_hook(lambda optimizer, _args, _kwargs: _move(optimizer, eps, generator))
        return optimizer

    setup.build_optimizer = built


def _move(optimizer: torch.optim.Optimizer, eps: float, generator: np.random.Generator) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                # A norm that is rounded moves all elements together; of elements moved each for itself it stays as it is.
                factors = 1.0 + eps * (generator.uniform(-1.0, 1.0) + generator.uniform(-1.0, 1.0, parameter.grad.shape))
                parameter.grad.mul_(torch.from_numpy(factors).to(parameter.grad.dtype))
