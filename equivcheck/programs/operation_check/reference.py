"""The single-device run, and the noise caused by rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from equivcheck.oracle.reference.noise import expected_of
from equivcheck.oracle.reference.reference import Reference
from equivcheck.programs.operation_check.run import run_operation
from equivcheck.programs.operation_check.task import OperationTask, invalid
from equivcheck.programs.run.reference import NOISE_LIMIT, disturbance, doubt_of
from equivcheck.programs.run.rounding_unit import RoundingUnit
from equivcheck.worlds.trace.moments import ValueTrace


def reference_of(task: OperationTask, num_copies: int) -> Reference:
    """Run the operation on one device, and return its values and gradients with tolerances.

    Tolerances come from `num_copies` runs with slightly changed inputs and results. Raises `UsageError` if one device cannot
    differentiate the operation. Other errors are raised unchanged.
    """
    plain = _one_device(task, None)
    runs = [plain, *(_one_device(task, seed) for seed in range(num_copies))]
    moved = [np.stack([each.snapshot.values for each in same]) for same in zip(*(run.moments for run in runs), strict=True)]
    expected = expected_of(plain, moved, None)
    return Reference(moments=expected, doubt=doubt_of(expected), noise_limit=NOISE_LIMIT)


def _one_device(task: OperationTask, seed: int | None) -> ValueTrace:
    disturb, rounding = None if seed is None else disturbance(seed), RoundingUnit()

    def perturb(value: torch.Tensor) -> torch.Tensor:
        return value if disturb is None else disturb(value, [], rounding.unit)

    def run_with_rounding(*arguments: Any) -> Any:
        with rounding:
            return task.function(*arguments)

    tensors = [perturb(tensor.clone()).requires_grad_(task.is_differentiated(tensor)) for _, tensor in task.tensors]
    return run_operation(task, _differentiable(task) if seed is None else run_with_rounding, tensors, perturb)


def _differentiable(task: OperationTask) -> Any:
    """Return the function, with an error if no result has a gradient to compare."""
    from equivcheck.programs.operation_check.task import named_tensors

    def function(*arguments: Any) -> Any:
        found = task.function(*arguments)
        wanted = [name for name, each in task.tensors if task.is_differentiated(each)]
        if wanted and not any(each is not None and each.requires_grad for _, each in named_tensors(found)):
            why = f"on one device no result has a gradient for {', '.join(wanted)}"
            raise invalid("gradients=True", why, "an operation with a derivative, or gradients=False")
        return found

    return function
