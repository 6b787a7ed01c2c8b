"""The same training on one device with the rounding of an optimizer that updates by the addends of a gradient.

DTensor leaves a gradient as one addend on each rank where nothing redistributes it. An operation of the optimizer that is linear
in the gradient then runs on the addends, and the sum over ranks comes after it: Adagrad divides each addend by the root of the
squares, in which the whole gradient stands. Addends that nearly cancel are each rounded to their own size, so that an update is
off by that share of them, while the gradient that ranks show is exact.
"""

from __future__ import annotations

import numpy as np
import torch

from equivcheck.oracle.reference.summation import split_steps
from equivcheck.scenario import Training
from equivcheck.training.loop import train
from equivcheck.training.setup import Setup
from equivcheck.training.single_device import single_device
from equivcheck.worlds.trace.trace import Trace

_NUM_RUNS = 8


def addend_traces(training: Training, num_addends: int) -> tuple[Trace, ...]:
    """Runs whose updates are moved by up to one unit in the last place of the addends that a gradient is the sum of."""
    generator, steps = np.random.default_rng(training.seed), split_steps(training, num_addends)
    return tuple(train(_setup(training, generator), steps) for _ in range(_NUM_RUNS))


def _setup(training: Training, generator: np.random.Generator) -> Setup:
    setup = single_device(training)
    addends = [_Addends(parameter) for parameter in setup.model.parameters() if parameter.requires_grad]

    def update(optimizer: torch.optim.Optimizer) -> None:
        before = [each.parameter.detach().clone() for each in addends]
        optimizer.step()
        for each, values in zip(addends, before, strict=True):
            each.move(values, generator)

    setup.before_step += [each.clear for each in addends]
    setup.before_update += [each.measure for each in addends]
    setup.update = update
    return setup


class _Addends:
    """How large the addends of a parameter's gradient are."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self._size = torch.zeros_like(parameter, requires_grad=False)
        self._share = torch.zeros_like(self._size)
        parameter.register_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, addend: torch.Tensor) -> None:
        self._size += addend.abs()

    def clear(self, _optimizer: torch.optim.Optimizer, _step: int) -> None:
        """Begin a step."""
        self._size.zero_()

    def measure(self, _optimizer: torch.optim.Optimizer, _step: int) -> None:
        """Note them in units of their sum, before that is clipped; nothing where it is zero."""
        gradient = self.parameter.grad
        self._share = torch.zeros_like(self._size) if gradient is None else self._size / gradient.abs()
        self._share[~self._share.isfinite()] = 0.0

    def move(self, before: torch.Tensor, generator: np.random.Generator) -> None:
        """Move the update of the parameter by rounding of the addends."""
        units = torch.from_numpy(generator.uniform(-1.0, 1.0, before.shape)).to(before.dtype)
        with torch.no_grad():
            self.parameter.add_((self.parameter - before) * self._share * units * torch.finfo(before.dtype).eps)
