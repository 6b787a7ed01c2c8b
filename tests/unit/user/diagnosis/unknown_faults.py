"""Wrong trainings outside the catalogue."""

from __future__ import annotations

import torch

from unit.user.diagnosis.wrong_gradients import changed
from unit.user.diagnosis.wrong_trainings import Wrong, averaged, by_hand, rank


def noisy(parameters: list[torch.Tensor]) -> None:
    """Each rank adds its own noise."""
    averaged(parameters)
    for parameter in parameters:
        parameter.grad += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank()))


class ZeroRow:
    """Zero another row in the first gradient at each step."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    def __call__(self, parameters: list[torch.Tensor]) -> None:
        """Count the call and zero a row."""
        averaged(parameters)
        number = self.steps[rank()] = self.steps.get(rank(), -1) + 1
        parameters[0].grad[number] = 0.0


def twice_wrong(parameters: list[torch.Tensor]) -> None:
    """Two mistakes at once."""
    averaged(parameters)
    for parameter in parameters:
        parameter.grad *= 2
    parameters[0].grad.zero_()


UNKNOWN: dict[str, tuple[Wrong, str]] = {
    "noise": (by_hand("", reduce=noisy), "ranks disagree on `0.weight`"),
    "two_faults": (by_hand("", reduce=twice_wrong), ""),
    "permuted": (
        by_hand("", reduce=changed(lambda gradient: gradient.roll(1, 0))),
        "permuted: the right elements",
    ),
    "transposed": (by_hand("", reduce=changed(lambda gradient: gradient.T.reshape(gradient.shape))), "transposed"),
    "zero_rows": (by_hand("", reduce=ZeroRow()), "row 0 of `0.weight` is zero"),
    "slightly_off": (by_hand("", reduce=changed(lambda gradient: gradient * (1 + 1e-12))), ""),
}
"""Mistakes outside the catalogue, each with its pattern."""
