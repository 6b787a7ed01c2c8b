"""Lists the operator overloads for which the installed torch has DTensor rules, and those that tensor programs call.

The rule tables are private; tried on torch 2.9 to 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from equivcheck.programs.nouns.arguments import dims_of, make, shapes_of
from equivcheck.programs.nouns.operations.operation import OperationFacts, Shape
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.program import Leaf
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.values import full_tensor

_TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
"""Attributes of the sharding propagator with rules by overload. Some torch versions do not have all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overloads:
    """Names of operator overloads that have a DTensor rule, or that tensor programs call, such as ``aten.add.Tensor``."""

    registered: frozenset[str]
    """Overloads with a DTensor rule or handler."""
    reached: frozenset[str]
    """Registered overloads that a tensor program's operation calls on one device, forward or backward."""
    unregistered: frozenset[str]
    """Overloads without a DTensor rule that a tensor program's operation calls. DTensor decomposes or refuses them."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Overloads with DTensor rules that no operation in tensor programs calls."""
        return tuple(sorted(self.registered - self.reached))


def overloads() -> Overloads:
    """Compare the overloads with DTensor rules in the installed torch with the overloads that tensor programs can call."""
    known = frozenset(map(str, _registered()))
    called = frozenset(name for facts in OPERATIONS.values() for name in called_by(facts))
    return Overloads(registered=known, reached=called & known, unregistered=called - known)


def _registered() -> Iterator[Any]:
    dispatcher = DTensor._op_dispatcher
    for name in _TABLES:
        yield from getattr(dispatcher.sharding_propagator, name, ())
    yield from getattr(dispatcher, "_custom_op_handlers", ())


class _Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the called overloads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def called_by(facts: OperationFacts) -> frozenset[str]:
    """Return the overloads that an operation and its backward pass call, for every argument shape that a sweep tries."""
    with warnings.catch_warnings(), _Called() as called:
        warnings.simplefilter("ignore")
        for tensors, dim in _arguments(facts):
            _attempt(partial(results_of, facts.name, tensors, dim))
    return frozenset(called.names)


def _attempt(call: Callable[[], tuple[Any, ...]]) -> None:
    try:
        found = [each for each in call() if each.requires_grad]
        if found:
            torch.autograd.backward(found, [torch.ones_like(each) for each in found])
    except Exception:
        return


def _arguments(facts: OperationFacts) -> Iterator[tuple[list[torch.Tensor], int]]:
    for shape in facts.shapes:
        for dim in dims_of(facts, shape):
            yield _tensors(facts, shape, dim), dim


def _tensors(facts: OperationFacts, shape: Shape, dim: int) -> list[torch.Tensor]:
    statements: list[Any] = [Leaf(shape=shape, placements=())]
    for seed, argument in enumerate(facts.arguments, start=1):
        made = next(iter(shapes_of(argument, shape, dim)), shape)
        statements.append(make(argument, made, (), seed=seed, high=argument.high(shape, dim)))
    tensors = [full_tensor(each) for each in statements]
    return [
        tensor.requires_grad_() if isinstance(each, Leaf) else tensor for each, tensor in zip(statements, tensors, strict=True)
    ]
