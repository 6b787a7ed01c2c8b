"""Detects and restores torch functions, classes and methods replaced by a program. Tested with torch 2.9, 2.13 and 2.15.

The namespaces below are read completely before and after a run and compared. Not seen are changes inside a function, and
references that other modules imported by name or that are bound to an object.
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
"""Modules whose functions and classes are compared."""
CLASSES = (
    ("torch", "Tensor"),
    ("torch.autograd", "Function"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.nn.parallel", "DistributedDataParallel"),
)
"""Classes whose methods are compared, in addition to those in `FAMILIES`."""
FAMILIES = ("torch.nn", "torch.optim")
"""Modules whose classes are compared with their methods: modules and optimizers."""


class Patches:
    """Finds functions, classes and methods that a program replaced in torch's modules, and restores them."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._spaces: list[Mapping[str, Any]] = []
        self._values: tuple[Any, ...] = ()
        self._before: list[dict[str, Any]] = []
        self._num_modules = 0

    def save(self) -> None:
        """Record the current functions, classes and methods as the originals."""
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._owners = list(_owners())
            self._spaces = [vars(owner) for owner in self._owners]
            self._values = ()
        if not self._as_saved():
            self._before = [dict(space) for space in self._spaces]
            self._values = self._read()

    def put_back(self) -> tuple[str, ...]:
        """Restore all replaced functions, classes and methods, and return their names."""
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
        """Yield owner, name and original value; None for a method that the class did not define itself."""
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
    with warnings.catch_warnings():  # some deprecated names in torch warn at each access
        warnings.simplefilter("ignore")
        return callable(value) or isinstance(value, classmethod | property)


def _same(before: Any, now: Any) -> bool:
    return now is before or _unhooked(now) is _unhooked(before)


def _unhooked(value: Any) -> Any:
    """Return the original function, without torch's own permanent wrappers.

    Torch wraps an optimizer class's ``step`` at its first instance, and all optimizers' methods at the first compilation.
    """
    original = getattr(value, "_torchdynamo_orig_callable", None)  # copied to wrappers of this wrapper
    value = original if original is not None and original is getattr(value, "__wrapped__", None) else value
    return value.__wrapped__ if getattr(value, "hooked", False) else value
