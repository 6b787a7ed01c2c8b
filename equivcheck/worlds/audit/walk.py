"""Finds torch's persistent state in modules, classes, caches, objects and C++.

Private torch API, tested with torch 2.9 to 2.15. Per-thread state is left out, because it already belongs to a rank.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import gc
import importlib
import itertools
import logging
import pkgutil
import re
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, GenericAlias, ModuleType
from typing import Any, TypeVar

import torch

from equivcheck.worlds.audit.assigned import assigned_variables

ROOTS = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.nn.modules.module",
    "torch.nn.attention",
    "torch.nn.utils.parametrize",
    "torch.optim",
    "torch.utils.checkpoint",
    "torch.utils._python_dispatch",
    "torch.autograd.graph",
    "torch.autograd.profiler",
    "torch._ops",
    "torch._subclasses",
)
"""Modules to search, each with all its submodules."""

SETTERS = ("torch._C", "torch._C._autograd", "torch._C._functorch", "torch._C._profiler", "torch._C._distributed_c10d")
"""C++ modules whose setters are listed, because the state that they set is not visible."""

_CONTAINERS = (dict, list, set, deque, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, itertools.count)
_library: Any = torch.library
_REGISTRATIONS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch.library.Library, _library.CustomOpDef)
_WITHOUT_STATE = (FunctionType, type, ModuleType, GenericAlias, TypeVar, enum.Enum, logging.Logger, *_REGISTRATIONS)
_OF_CLASSES = (
    "_field_defaults",
    "_member_map_",
    "_member_names_",
    "_unhashable_values_",
    "_unhashable_values_map_",
    "_value2member_map_",
    "_hashable_values_",
)
"""Attributes added to named tuples and enums by Python."""
_OF_THREAD = (threading.local, contextvars.ContextVar)
_SETTER = re.compile(r"(^|_)(set|enable|disable)(_|[A-Z])")
_DEPTH = 3
"""Maximum depth when attributes of objects are followed."""


def import_all(skip: Callable[[str], bool]) -> None:
    """Import torch and all its submodules, except modules for which `skip` returns True.

    A module that cannot be imported is ignored.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for root in ROOTS:
            _import_below(root, skip)


def _import_below(name: str, skip: Callable[[str], bool]) -> None:
    if skip(name):
        return
    try:
        module = importlib.import_module(name)
    except Exception:  # a dependency is not installed
        return
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        _import_below(f"{name}.{found.name}", skip)


def walk(skip: Callable[[str], bool]) -> set[str]:
    """Return the full names of all variables, flags and caches found in torch's imported modules.

    Modules for which `skip` returns True are left out.
    """
    modules = [module for name, module in sorted(sys.modules.items()) if _is_below_root(name) and not skip(name)]
    with warnings.catch_warnings():  # some deprecated names warn at each access
        warnings.simplefilter("ignore")
        places = _Places(modules)
        return {*places.names, *_caches(skip), *_setters()}


def _is_below_root(name: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in ROOTS)


class _Places:
    """Names for objects held by modules; an object held by several modules gets its first name."""

    def __init__(self, modules: list[ModuleType]) -> None:
        self.names: set[str] = set()
        self._seen: dict[int, str] = {}
        for module in modules:
            self._look(module.__name__, vars(module), _DEPTH)
        for module in modules:
            for cls in _classes(module):
                self._look(f"{module.__name__}.{cls.__qualname__}", vars(cls), _DEPTH)
        for module in modules:
            for owner, name in assigned_variables(module):
                self._add_assigned(owner, name)

    def _look(self, owner: str, namespace: Mapping[str, Any], depth: int) -> None:
        for name, value in list(namespace.items()):
            if not name.startswith("__") and name not in _OF_CLASSES and _is_state(value) and id(value) not in self._seen:
                self._seen[id(value)] = f"{owner}.{name}"
                self.names.add(f"{owner}.{name}")
                if depth and not isinstance(value, _CONTAINERS):
                    self._look(f"{owner}.{name}", getattr(value, "__dict__", {}), depth - 1)

    def _add_assigned(self, owner: Any, name: str) -> None:
        """Add a variable assigned by a function, if its owner is a module, class, function or listed object."""
        if isinstance(owner, ModuleType):
            where = owner.__name__
        elif isinstance(owner, type | FunctionType):
            where = f"{owner.__module__}.{owner.__qualname__}"
        else:
            where = self._seen.get(id(owner), "")
        if _is_below_root(where) and not isinstance(vars(owner).get(name), _OF_THREAD):
            self.names.add(f"{where}.{name}")


def _is_state(value: Any) -> bool:
    """Whether a value can change: a container or a torch object."""
    if isinstance(value, _WITHOUT_STATE + _OF_THREAD):
        return False
    return isinstance(value, _CONTAINERS) or (type(value).__module__.startswith("torch") and hasattr(value, "__dict__"))


def _classes(module: ModuleType) -> Iterator[type]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value
            yield from (
                inner for inner in vars(value).values() if isinstance(inner, type) and inner.__module__ == module.__name__
            )


def _caches(skip: Callable[[str], bool]) -> Iterator[str]:
    """Yield functions with cached results, wherever they are bound."""
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper):
            module = str(getattr(found, "__module__", ""))
            if _is_below_root(module) and not skip(module):
                yield f"{module}.{found.__qualname__}"


def _setters() -> Iterator[str]:
    for module in SETTERS:
        namespace = vars(sys.modules[module]) if module in sys.modules else {}
        yield from (f"{module}.{name}" for name, value in namespace.items() if callable(value) and _SETTER.search(name))
