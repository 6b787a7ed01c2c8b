"""Finds state that a user's steps keep outside the model, such as a moving average of the weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from equivcheck.user.task import Task
from equivcheck.user.traces.optimizers import optimizers_in


def state_outside(task: Task, model: nn.Module) -> tuple[str, ...]:
    """Return descriptions of objects with state that the user's step functions keep, such as a moving average of the weights.

    `model`, its modules and the optimizers do not count. Empty if `also` is given, because the user then chose the objects to
    compare.
    """
    functions = [] if task.also is not None else [task.step, task.rank_step]
    parts = set(map(id, model.modules()))
    found = {
        name: type(value).__name__
        for function in functions
        for name, value in _kept_by(function)
        if id(value) not in parts and _has_state(value) and not optimizers_in(value)
    }
    return tuple(f"`{name}` ({kind})" for name, kind in found.items())


def _kept_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield variables that a function closes over, arguments of a partial, and attributes of an object.

    Dicts and lists are searched too.
    """
    if isinstance(function, functools.partial):
        yield from _kept_by(function.func)
        variables: dict[str, Any] = dict(enumerate(function.args)) | function.keywords  # type: ignore[assignment]
    elif inspect.ismethod(function):
        variables = getattr(function.__self__, "__dict__", {})
    elif inspect.isfunction(function):
        variables = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                variables[name] = cell.cell_contents
    else:
        variables = getattr(function, "__dict__", {})
    for name, value in variables.items():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        yield from ((str(name), part) for part in inner)


def _has_state(value: Any) -> bool:
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return False
    try:
        return bool(value.state_dict())
    except Exception:  # another method of this name
        return False
