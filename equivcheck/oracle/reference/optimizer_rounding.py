"""Copies of the reference that move as what an optimizer rounds on its way can move them.

Muon computes in bfloat16. Of a matrix in shards each rank rounds its part of a norm or of a product, and the sum of the parts is
rounded again: a training on one device that rounds like that leaves the very bits of the ranks. What a product is rounded from
cancels in the polynomial that follows, so that moving what goes in tells less than moving what each operation leaves.

`TorchDispatchMode` is torch's own and has an underscore in its path; tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equivcheck.scenario import Training
from equivcheck.training.copies import MakeSetup
from equivcheck.training.setup import Setup
from equivcheck.training.single_device import single_device

_ROUNDING: Final = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
)
"""Operations of optimizers whose results are rounded."""


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
    """Move by one unit in the last place what an optimizer computes in fewer digits than the parameters have."""
    if not setup.training.optimizer.rounds_to:
        return
    kind, update = getattr(torch, setup.training.optimizer.rounds_to), setup.update

    def updated(optimizer: torch.optim.Optimizer) -> None:
        with MovedRoundings(kind, generator):
            update(optimizer)

    setup.update = updated


class MovedRoundings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves each result of an element type that is rounded to it, by up to one unit in its last place."""

    def __init__(self, kind: torch.dtype, generator: np.random.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.generator = kind, generator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation, and then the move."""
        result = function(*args, **(kwargs or {}))
        if function in _ROUNDING and result.dtype is self.kind:
            units = torch.from_numpy(self.generator.uniform(-1.0, 1.0, result.shape))
            result.copy_(result * (1.0 + torch.finfo(self.kind).eps * units))
        return result
