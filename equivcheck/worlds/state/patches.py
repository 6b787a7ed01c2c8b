"""Functions, classes and methods of torch that a program has replaced; tried on torch 2.9, 2.13 and 2.15.

The namespaces below are read whole before and after a run: one comparison of all their values. What was imported elsewhere by
name before, or is bound to an object, stays as it was bound; what a program does to the inside of a function is not seen.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

MODULES = (
    "torch",
    "torch.autograd",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.linalg",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.optim",
    "torch.utils.checkpoint",
)
"""Modules of which functions and classes are looked at."""
CLASSES = (
    ("torch", "Tensor"),
    ("torch.autograd", "Function"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.nn.parallel", "DistributedDataParallel"),
)
"""Classes of which methods are looked at, besides those that have a name in one of the next."""
FAMILIES = ("torch.nn", "torch.optim")
"""Modules whose classes are looked at, each with its methods: modules and optimizers."""


class Patches:
    """What the namespaces hold, to be compared with later."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._spaces: list[Mapping[str, Any]] = []
        self._values: tuple[Any, ...] = ()
        self._before: list[dict[str, Any]] = []
        self._num_modules = 0

    def save(self) -> None:
        """Take what is there now for what belongs there."""
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._owners = list(_owners())
            self._spaces = [vars(owner) for owner in self._owners]
            self._values = ()
        if not self._as_saved():
            self._before = [dict(space) for space in self._spaces]
            self._values = self._read()

    def put_back(self) -> tuple[str, ...]:
        """Put back what was replaced since; the names of it."""
        if self._as_saved():
            return ()
        found = list(self._replaced())
        for owner, name, value in found:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        return tuple(f"{getattr(owner, '__qualname__', owner.__name__)}.{name}" for owner, name, _ in found)

    def _read(self) -> tuple[Any, ...]:
        return tuple(chain.from_iterable([space.values() for space in self._spaces]))

    def _as_saved(self) -> bool:
        try:
            return self._read() == self._values
        except Exception:  # a value that is new there need not know how to compare itself
            return False

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Owner, name and value before, which is None of a method that a class did not have of its own."""
        for owner, space, before in zip(self._owners, self._spaces, self._before, strict=True):
            for name, value in before.items():
                if _is_code(value) and not _same(value, space.get(name)):
                    yield owner, name, value
            if isinstance(owner, type):
                added = {name: value for name, value in space.items() if name not in before and _is_code(value)}
                inherited = super(owner, owner)
                yield from (
                    (owner, name, None) for name, value in added.items() if not _same(getattr(inherited, name, None), value)
                )


def _owners() -> Iterator[Any]:
    modules = [sys.modules[name] for name in MODULES if name in sys.modules]
    yield from modules
    found = [vars(sys.modules[module])[name] for module, name in CLASSES if module in sys.modules]
    for family in FAMILIES:
        found += [value for value in vars(sys.modules[family]).values() if isinstance(value, type)]
    yield from dict.fromkeys(found)


def _is_code(value: Any) -> bool:
    with warnings.catch_warnings():  # of names in torch that are out of date, which some tell at any look
        warnings.simplefilter("ignore")
        return callable(value) or isinstance(value, classmethod | property)


def _same(before: Any, now: Any) -> bool:
    return now is before or _unhooked(now) is _unhooked(before)


def _unhooked(value: Any) -> Any:
    """The function itself: torch wraps ``step`` of an optimizer's class once and for all when it makes the first instance."""
    return value.__wrapped__ if getattr(value, "hooked", False) else value
