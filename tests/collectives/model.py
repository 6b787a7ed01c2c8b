"""What collectives mean: plain functions in NumPy over what each member of a group puts in. No torch.

Arrays are those of the members, in the order of their ranks within the group; who puts in one array for each member has a list of
parts. Results are per member; None stands for a result that nobody promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Parts = Sequence[Array]

FOLDS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda stack: np.logical_or.reduce(stack) if stack.dtype == bool else stack.sum(0, dtype=stack.dtype),
    "avg": lambda stack: stack.sum(0) / len(stack),
    "product": lambda stack: np.logical_and.reduce(stack) if stack.dtype == bool else stack.prod(0, dtype=stack.dtype),
    "min": lambda stack: stack.min(0),
    "max": lambda stack: stack.max(0),
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}
"""Each reduction of a stack of the members' arrays; integers wrap, and sum and product of booleans are *or* and *and*."""


def fold(arrays: Parts, op: str) -> Array:
    """The reduction of equally shaped arrays."""
    return np.asarray(FOLDS[op](np.stack(arrays)))


# Collectives.


def all_reduce(inputs: Parts, op: str) -> list[Array]:
    """Everybody gets the reduction."""
    return [fold(inputs, op)] * len(inputs)


def reduce(inputs: Parts, op: str, root: int) -> list[Array | None]:
    """The root gets the reduction."""
    return [fold(inputs, op) if member == root else None for member in range(len(inputs))]


def broadcast(inputs: Parts, root: int) -> list[Array]:
    """Everybody gets the root's array."""
    return [inputs[root]] * len(inputs)


def all_gather(inputs: Parts) -> list[list[Array]]:
    """Everybody gets every array."""
    return [list(inputs)] * len(inputs)


def gather(inputs: Parts, root: int) -> list[list[Array]]:
    """The root gets every array, others get none."""
    return [list(inputs) if member == root else [] for member in range(len(inputs))]


def scatter(parts: Sequence[Parts], root: int) -> list[Array]:
    """Member i gets the root's i-th part."""
    return list(parts[root])


def reduce_scatter(parts: Sequence[Parts], op: str) -> list[Array]:
    """Member i gets the reduction of everybody's i-th part."""
    return [fold([given[member] for given in parts], op) for member in range(len(parts))]


def all_to_all(parts: Sequence[Parts]) -> list[list[Array]]:
    """Member i gets everybody's i-th part."""
    return [[given[member] for given in parts] for member in range(len(parts))]


# Adjoints: what the gradients of the inputs are, given those of the outputs; of extrema, which are not linear, at these inputs.


def extremum_adjoint(inputs: Parts, gradients: Parts, op: str) -> list[Array]:
    """Of each element, the members that hold the least or greatest value have equal parts of the sum of the gradients."""
    total, holders = fold(gradients, "sum"), np.stack(inputs) == fold(inputs, op)
    share = total / holders.sum(0, dtype=total.dtype)
    return [np.where(holds, share, np.zeros_like(share)) for holds in holders]


def all_reduce_adjoint(gradients: Parts, op: str) -> list[Array]:
    """The same reduction of the gradients; for sum and average only."""
    return all_reduce(gradients, op)


def reduce_adjoint(gradients: Parts, op: str, root: int) -> list[Array]:
    """The root's gradient goes to everybody, an n-th of it for an average."""
    scale = len(gradients) if op == "avg" else 1
    return [gradients[root] / scale] * len(gradients)


def broadcast_adjoint(gradients: Parts, root: int) -> list[Array]:
    """The source gets the sum, others zeros: what they put in was overwritten."""
    total = fold(gradients, "sum")
    return [total if member == root else np.zeros_like(total) for member in range(len(gradients))]


def all_gather_adjoint(gradients: Sequence[Parts]) -> list[Array]:
    """A reduce-scatter."""
    return reduce_scatter(gradients, "sum")


def gather_adjoint(gradients: Sequence[Parts], root: int) -> list[Array]:
    """A scatter of the root's gradients."""
    return scatter(gradients, root)


def scatter_adjoint(gradients: Parts, root: int) -> list[list[Array]]:
    """A gather of the gradients at the root; others get zeros."""
    zeros = [np.zeros_like(gradient) for gradient in gradients]
    return [list(gradients) if member == root else zeros for member in range(len(gradients))]


def reduce_scatter_adjoint(gradients: Parts, op: str) -> list[list[Array]]:
    """An all-gather, of an n-th for an average."""
    scale = len(gradients) if op == "avg" else 1
    return all_gather([gradient / scale for gradient in gradients])


def all_to_all_adjoint(gradients: Sequence[Parts]) -> list[list[Array]]:
    """The inverse exchange, which is the same one."""
    return all_to_all(gradients)
