"""Requests to gloo ranks: a program with its arguments, pickled once for all ranks.

Changed environment variables and import paths are sent too.
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from equivcheck.errors import UsageError

_Cached = type(functools.lru_cache(len))
"""Type of functions with a cache. Pickle copies only their names."""


def pickle_task(program: Callable[..., Any], arguments: tuple[Any, ...], *, is_user_code: bool = True) -> bytes:
    """Pickle a program and its arguments for processes of ranks. Raises `UsageError` if they cannot be pickled.

    A user's program may be a closure or defined in the main script, which ranks never import. Its code is therefore pickled by
    value.
    """
    try:
        return pickle_copy((program, arguments)) if is_user_code else pickle.dumps((program, arguments), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UsageError(
            f"program {program!r} is not valid: it or its arguments cannot be pickled for gloo's processes: {error}"
        ) from error


def pickle_copy(value: object) -> bytes:
    """Pickle an object for another process. Classes and functions that cannot be imported there are pickled by value.

    Raises the same exceptions as `pickle`.
    """
    file = io.BytesIO()
    _pickler()(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


@functools.cache
def _pickler() -> Any:
    """Subclass of cloudpickle's pickler, imported only for users' programs.

    The class also handles modules of special types (torch's configurations), and pickles by value the code of modules that ranks
    cannot import, such as tests that pytest imported from a file.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
                return importlib.import_module, (value.__name__,)
            if isinstance(value, _Cached) and not _is_importable(value):
                return _with_empty_cache, (value.__wrapped__, value.cache_parameters())
            module = sys.modules.get(value.__module__) if isinstance(value, FunctionType | type) else None
            if type(module) is not ModuleType or module.__name__ in cloudpickle.list_registry_pickle_by_value():
                return super().reducer_override(value)
            if _is_found_elsewhere(module.__name__, getattr(module, "__file__", None)):
                return super().reducer_override(value)
            cloudpickle.register_pickle_by_value(module)
            try:
                return super().reducer_override(value)
            finally:  # the registration must not affect other users of cloudpickle in this process
                cloudpickle.unregister_pickle_by_value(module)

    return Pickler


def _is_importable(cached: Any) -> bool:
    module = sys.modules.get(cached.__module__)
    if module is None:
        return True
    return module.__name__ != "__main__" and _is_found_elsewhere(module.__name__, getattr(module, "__file__", None))


def _with_empty_cache(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


@functools.cache
def _is_found_elsewhere(name: str, file: str | None) -> bool:
    """Whether another process imports this module from the same file; True for modules without Python source."""
    if file is None or not file.endswith(".py"):
        return True
    path: Sequence[str] | None = None
    for package in itertools.accumulate(name.split("."), "{}.{}".format):
        found = (finder.find_spec(package, path) for finder in sys.meta_path)
        specification = next((each for each in found if each is not None), None)
        if specification is None:
            return False
        path = specification.submodule_search_locations
    assert specification is not None, "a module has a name"
    return not specification.has_location or specification.origin == file


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Import path and environment variables that ranks take over from their parent process."""

    path: tuple[str, ...]
    """`sys.path` with absolute entries."""
    environment: Mapping[str, str]
    """Copy of `os.environ`."""

    @classmethod
    def of_owner(cls) -> Surroundings:
        """Return the current import path and environment variables of this process."""
        return cls(path=import_path(), environment=dict(os.environ))


def request(task: bytes, surroundings: Surroundings | None, *, is_user_code: bool = True) -> bytes:
    """Pack a task from `pickle_task` into a message for all ranks.

    `surroundings` is None if the ranks already have the current import path and environment variables.
    """
    return pickle.dumps((surroundings, is_user_code, task), pickle.HIGHEST_PROTOCOL)


def import_path() -> tuple[str, ...]:
    """Return `sys.path` with absolute entries, for use in another process."""
    return tuple(entry if entry.startswith("/") else str(Path.cwd() / entry) for entry in sys.path)
