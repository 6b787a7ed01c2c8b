"""Runs tensor programs on plain tensors. Each rank's tensor has its placements as an attribute."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from equivcheck.programs.nouns.placement import REPLICATE, partial, reduction_of, sharded_dim
from equivcheck.programs.nouns.program import Operation, TensorProgram
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.one_device import Outputs, gradient_of
from equivcheck.programs.run.plain.collectives import Collectives
from equivcheck.programs.run.plain.conversion import Placements, convert
from equivcheck.programs.run.plain.rules import needs
from equivcheck.programs.run.rank import DTensorTarget
from equivcheck.programs.run.values import local_part


class PlainTarget(DTensorTarget):
    """Runs a program's statements on plain tensors, with a collective for each change of placement."""

    fills_gradients: ClassVar[bool] = True
    runs_on_dtensors: ClassVar[bool] = False
    collectives: type[Collectives] = Collectives

    def __init__(self, program: TensorProgram) -> None:
        super().__init__(program)
        self.axes = [self.collectives(self.mesh, axis) for axis in range(self.mesh.ndim)]
        self.replicated = (REPLICATE,) * self.mesh.ndim

    def distribute(self, full: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        """Return this rank's part from a full tensor, with these placements as an attribute."""
        if any(reduction_of(each) not in (None, "sum", "avg") for each in placements):
            raise NotImplementedError(
                f"{placements} is not supported on plain tensors: only partial sums and averages can be differentiated"
            )
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return _with_placements(local_part(full, self.program.mesh, coordinate, placements), placements, full.shape)

    def clone(self, value: Any) -> torch.Tensor:
        """Clone a value with the same placements."""
        return _with_placements(value.clone(), value.placements, value.full_shape)

    def call(self, statement: Operation, arguments: list[Any]) -> Outputs:
        """Run an operation on each rank's own parts if a sharding rule allows it, otherwise on replicated tensors.

        Arguments first get the placements that the rule needs. Each mesh axis has its own rule.
        """
        current, shapes = [each.placements for each in arguments], [tuple(each.full_shape) for each in arguments]
        along = [needs(statement, [each[axis] for each in current], shapes) for axis in range(self.mesh.ndim)]
        wanted = [tuple(each[0][number] for each in along) for number in range(len(arguments))]
        parts = [self.convert_argument(each, placements) for each, placements in zip(arguments, wanted, strict=True)]
        placements = tuple(each[1] for each in along)
        found = self.results(statement, parts, wanted, placements)
        return tuple(
            _with_placements(each, placements, self._full_shape(each.shape, placements, statement, arguments)) for each in found
        )

    def results(
        self,
        statement: Operation,
        parts: list[torch.Tensor],
        wanted: list[Placements],  # noqa: ARG002 - used by TypedTarget
        left: Placements,  # noqa: ARG002
    ) -> Outputs:
        """Run an operation on this rank's parts.

        `wanted` has the placements of the arguments, and `left` the placements of the results. Only a subclass uses them.
        """
        return results_of(statement.name, parts, statement.dim)

    def convert_argument(self, value: Any, placements: Placements) -> torch.Tensor:
        """Return an argument with the placements that the operation needs."""
        return self.convert(value, placements)

    def convert(self, value: Any, placements: Placements) -> torch.Tensor:
        """Return a value with other placements."""
        return convert(value, value.full_shape, value.placements, placements, self.axes)

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Return a value with other placements, as a new tensor."""
        moved = self.convert(value, placements)
        return _with_placements(moved.clone() if moved is value else moved, placements, value.full_shape)

    def round_trip(self, value: Any) -> torch.Tensor:
        """Clone the value. There is no local tensor to convert, because the value is a plain tensor."""
        return self.clone(value)

    def full_tensor(self, value: Any) -> torch.Tensor:
        """Return a value's full tensor.

        Its gradient flows back on the first rank only. Otherwise the backward pass would add the gradients from all ranks.
        """
        full = self.convert(value, self.replicated)
        share = float(all(axis.index == 0 for axis in self.axes))
        return full * share + (full * (1 - share)).detach() if full.requires_grad and torch.is_grad_enabled() else full

    def gradient(self, value: Any) -> torch.Tensor | None:
        """Return a value's gradient as a full tensor; None if it has no gradient."""
        gradient = gradient_of(value, fills=self.fills_gradients)
        if gradient is None:
            return None
        scale = 1
        for placement, axis in zip(value.placements, self.axes, strict=True):
            scale *= axis.size if reduction_of(placement) == "avg" else 1
        with torch.no_grad():
            return convert(
                gradient * scale, value.full_shape, tuple(map(_gradient_placement, value.placements)), self.replicated, self.axes
            )

    def as_value(self, value: Any) -> torch.Tensor:
        """Return an operation's result. If it has no placements, it counts as replicated."""
        return value if hasattr(value, "full_shape") else self.from_replicated(value)

    def from_replicated(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that all ranks have, and mark it as replicated."""
        return _with_placements(value.clone(), self.replicated, value.shape)

    def _full_shape(self, shape: Any, placements: Placements, statement: Operation, arguments: list[Any]) -> tuple[int, ...]:
        cut = [dim for each in placements if (dim := sharded_dim(each)) is not None]
        if not cut:
            return tuple(shape)
        wholes = [torch.empty(tuple(each.full_shape), dtype=each.dtype, device="meta") for each in arguments]
        return tuple(results_of(statement.name, wholes, statement.dim)[0].shape)


def _with_placements(tensor: torch.Tensor, placements: Placements, shape: Any) -> torch.Tensor:
    noted: Any = tensor
    noted.placements, noted.full_shape = placements, tuple(shape)
    return tensor


def _gradient_placement(placement: str) -> str:
    if placement == REPLICATE:
        return partial()
    return REPLICATE if reduction_of(placement) else placement
