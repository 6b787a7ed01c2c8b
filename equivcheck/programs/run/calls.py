"""Torch operations in tensor programs, as Python functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from equivcheck.programs.nouns.operations.operation import OperationFacts
from equivcheck.programs.nouns.operations.registry import OPERATIONS

NAMES = ("a", "b", "c", "d")
"""Argument names in calls."""


def source(facts: OperationFacts, prefix: str = "") -> str:
    """Return Python source that defines a function for an operation. `prefix` is added before the function's name."""
    parameters = (*NAMES[: facts.num_arguments], *(("dim",) if facts.takes_dim else ()))
    *before, result = facts.call.strip().splitlines()
    lines = [f"def {prefix}{facts.name}({', '.join(parameters)}):", *(f"    {line}" for line in before), f"    return {result}"]
    return "\n".join(lines)


@cache
def function_of(name: str) -> Callable[..., Any]:
    """Return the function that runs operation `name`. It takes the operation's tensors, then ``dim`` if the operation has one."""
    namespace: dict[str, Any] = {"torch": torch, "F": functional}
    exec(compile(source(OPERATIONS[name]), f"<operation {name}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def results_of(name: str, tensors: list[Any], dim: int) -> tuple[Any, ...]:
    """Run operation `name`, and return all its results as a tuple of tensors.

    Numbers and booleans become tensors without dims.
    """
    return call(function_of(name), name, tensors, dim)


def call(function: Callable[..., Any], name: str, tensors: list[Any], dim: int) -> tuple[Any, ...]:
    """Call `function` with the arguments of operation `name`, and return all its results as a tuple of tensors."""
    found = function(*tensors, *((dim,) if OPERATIONS[name].takes_dim else ()))
    several = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in several)
