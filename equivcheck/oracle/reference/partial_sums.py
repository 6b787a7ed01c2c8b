"""Single-device runs that round like an optimizer on partial sums.

If nothing redistributes a gradient, DTensor keeps it as Partial, with one partial sum per rank. The optimizer's linear operations
then run on the partial sums, and the all-reduce follows: Adagrad divides each partial sum by a root that is taken from the full
gradient. If partial sums nearly cancel, each is rounded at its own size. The update is then off by many times the usual rounding,
although the gradient is exact.
"""

from __future__ import annotations

import numpy as np
import torch

from equivcheck.oracle.reference.summation import split_steps
from equivcheck.scenario import Training
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.trace import Trace

_NUM_RUNS = 8


def partial_sum_traces(training: Training, num_partial_sums: int) -> tuple[Trace, ...]:
    """Train several times on one device, each time with random rounding errors in the optimizer's updates.

    The errors are as large as if the optimizer ran on partial sums: up to one unit in the last place of each sum. Each
    microbatch's gradient is divided into `num_partial_sums` such sums.
    """
    generator, steps = np.random.default_rng(training.seed), split_steps(training, num_partial_sums)
    return tuple(train(_setup(training, generator), steps) for _ in range(_NUM_RUNS))


def _setup(training: Training, generator: np.random.Generator) -> Setup:
    setup = single_device_setup(training)
    partial_sums = [_PartialSums(parameter) for parameter in setup.model.parameters() if parameter.requires_grad]

    def update(optimizer: torch.optim.Optimizer) -> None:
        before = [each.parameter.detach().clone() for each in partial_sums]
        optimizer.step()
        for each, values in zip(partial_sums, before, strict=True):
            each.move(values, generator)

    setup.before_step += [each.clear for each in partial_sums]
    setup.before_update += [each.measure for each in partial_sums]
    setup.update = update
    return setup


class _PartialSums:
    """Sizes of the partial sums in a parameter's gradient."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self._size = torch.zeros_like(parameter, requires_grad=False)
        self._share = torch.zeros_like(self._size)
        parameter.register_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, partial_sum: torch.Tensor) -> None:
        self._size += partial_sum.abs()

    def clear(self, _optimizer: torch.optim.Optimizer, _step: int) -> None:
        """Forget the partial sums of the previous step."""
        self._size.zero_()

    def measure(self, _optimizer: torch.optim.Optimizer, _step: int) -> None:
        """Store the sum over the partial sums' absolute values, divided by the gradient's absolute value before clipping.

        It is 0 for elements with a zero gradient.
        """
        gradient = self.parameter.grad
        self._share = torch.zeros_like(self._size) if gradient is None else self._size / gradient.abs()
        self._share[~self._share.isfinite()] = 0.0

    def move(self, before: torch.Tensor, generator: np.random.Generator) -> None:
        """Add random rounding errors to the parameter's last update, as large as the rounding errors of its partial sums."""
        units = torch.from_numpy(generator.uniform(-1.0, 1.0, before.shape)).to(before.dtype)
        with torch.no_grad():
            self.parameter.add_((self.parameter - before) * self._share * units * torch.finfo(before.dtype).eps)
