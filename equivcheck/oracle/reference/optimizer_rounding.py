"""Copies of the reference with a small change in each result that the optimizer rounds.

Muon computes in bfloat16. If a matrix is sharded, each rank rounds its part in a norm or product, and the sum is rounded again. A
single-device training that rounds the same parts reproduces the ranks bit for bit. Muon's polynomial cancels most input changes,
so each operation's result is moved instead.

`TorchDispatchMode` is private API (an underscore in its path); tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equivcheck.scenario import Training
from equivcheck.training.copies import MakeSetup
from equivcheck.training.loop import single_device_setup
from equivcheck.training.setup import Setup

_ROUNDING: Final = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
)


def rounding_setup(training: Training) -> MakeSetup:
    """Return a function that sets up copies of a training.

    The first copy is unchanged. In each other copy, the optimizer rounds differently.
    """
    if not training.optimizer.rounds_to:
        return single_device_setup
    generator = np.random.default_rng(training.seed)
    num_made = 0

    def make_setup(training: Training, parameters: Mapping[str, torch.Tensor]) -> Setup:
        nonlocal num_made
        setup = single_device_setup(training, parameters)
        if num_made:
            round_in_optimizer(setup, generator)
        num_made += 1
        return setup

    return make_setup


def round_in_optimizer(setup: Setup, generator: np.random.Generator) -> None:
    """Change each low-precision result inside the optimizer's step by up to one unit in the last place."""
    if not setup.training.optimizer.rounds_to:
        return
    kind, update = getattr(torch, setup.training.optimizer.rounds_to), setup.update

    def update_with_perturbation(optimizer: torch.optim.Optimizer) -> None:
        with RoundingPerturbation(kind, generator):
            update(optimizer)

    setup.update = update_with_perturbation


class RoundingPerturbation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that changes each rounded result of element type `kind` by up to one unit in the last place."""

    def __init__(self, kind: torch.dtype, generator: np.random.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.generator = kind, generator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then change its result."""
        result = function(*args, **(kwargs or {}))
        if function in _ROUNDING and result.dtype is self.kind:
            units = torch.from_numpy(self.generator.uniform(-1.0, 1.0, result.shape))
            result.copy_(result * (1.0 + torch.finfo(self.kind).eps * units))
        return result
