"""A user's operation with its inputs and its mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.errors import UsageError

Function = Callable[..., Any]
"""Function to check. Its arguments are the inputs, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationTask:
    """Validated arguments for `check_operation`, with inputs for one seed."""

    function: Function
    """The user's function, which one device calls."""
    on_ranks: Callable[[DeviceMesh], Function] | None
    """Function that takes the mesh and returns the function for ranks. None if ranks call `function`, too."""
    setup: Callable[[], Any] | None
    """Function that each process calls first, for example to register sharding rules. None if nothing is needed."""
    inputs: tuple[Any, ...]
    """Arguments for the function: full tensors and other values."""
    names: tuple[str, ...]
    """Argument names."""
    mesh: tuple[tuple[str, int], ...]
    """Name and size for each mesh axis, outermost first."""
    gradients: bool
    """Whether gradients are compared."""
    refuses: str
    """Regular expression for errors that count as clear refusals, in addition to DTensor's own; empty for none."""
    seed: int
    """Seed for torch's default generator before each call."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Mesh axis sizes."""
        return tuple(size for _, size in self.mesh)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Mesh axis names."""
        return tuple(name for name, _ in self.mesh)

    @property
    def num_ranks(self) -> int:
        """Mesh size, in ranks."""
        return math.prod(self.sizes)

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Tensors among the inputs, with their names."""
        pairs = zip(self.names, self.inputs, strict=True)
        return tuple((name, each) for name, each in pairs if isinstance(each, torch.Tensor))

    def is_differentiated(self, tensor: torch.Tensor) -> bool:
        """Whether the gradient for this input tensor is compared."""
        return self.gradients and tensor.is_floating_point()


def invalid(argument: str, why: str, expected: str) -> UsageError:
    """Return the error for an invalid argument to `check_operation`, with the reason and the expected form."""
    return UsageError(f"check_operation: {argument} is not valid: {why}. Expected {expected}")


def named_tensors(found: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each tensor in an operation's result with its name, also from nested tuples, lists and dicts.

    Raises `UsageError` for results that cannot be compared.
    """
    if found is None or isinstance(found, torch.Tensor):
        yield name, found
    elif isinstance(found, (bool, int, float)):
        yield name, torch.tensor(found, dtype=torch.float64 if isinstance(found, float) else None)
    elif isinstance(found, Mapping):
        for key, each in found.items():
            yield from named_tensors(each, f"{name}[{key!r}]")
    elif isinstance(found, (tuple, list)):
        for number, each in enumerate(found):
            yield from named_tensors(each, f"{name} {number}" if name == "output" else f"{name}[{number}]")
    else:
        expected = "tensors, numbers, None, or tuples, lists and dicts of these"
        raise invalid(f"{name} {found!r:.100}", "it cannot be compared", f"{expected}")
