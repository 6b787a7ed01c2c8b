"""Reads recipes: Python files that define the object for a command, such as a `Matrix`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.system.files import read_text
from equivcheck.user.usage import invalid

T = TypeVar("T")
MODULE = "equivcheck_recipe"
"""Module name for a recipe, so that code under ``if __name__ == "__main__"`` does not run."""


def defined_in(path: Path, kind: type[T]) -> T:
    """Run a recipe file, and return the only object of the class `kind` that it defines.

    Raises `UsageError` if there is none, or several.
    """
    found = {id(value): value for value in vars(_module(path)).values() if isinstance(value, kind)}
    if len(found) != 1:
        expected = f"exactly one, `{kind.__name__.lower()} = equivcheck.{kind.__name__}(...)`"
        raise invalid(f"{path}", f"it defines {len(found) or 'no'} {kind.__name__}", expected, api="recipe")
    return next(iter(found.values()))


def _module(path: Path) -> ModuleType:
    """Run a file as a module that can import its neighbours, like a script."""
    read_text(path)
    specification = importlib.util.spec_from_file_location(MODULE, path.resolve())
    if specification is None or specification.loader is None:
        raise invalid(f"{path}", "it is not a Python file", "a file name that ends in .py", api="recipe")
    module = importlib.util.module_from_spec(specification)
    sys.modules[MODULE] = module
    try:
        with _found_first(path.resolve().parent):
            specification.loader.exec_module(module)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raised = shorten_to_line(f"{type(error).__name__}: {error}")
        why = f"it raised {raised}{_line(path, error)}"
        raise invalid(f"{path}", why, "a file that can be imported", api="recipe") from error
    return module


@contextlib.contextmanager
def _found_first(folder: Path) -> Iterator[None]:
    """Put a folder first on `sys.path` inside this context only, because the process may import other modules later."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # if the recipe removed it
            sys.path.remove(str(folder))


def _line(path: Path, error: BaseException) -> str:
    """Return the line in the recipe that raised; empty if it is unknown."""
    trace, number = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path.resolve():
            number = trace.tb_lineno
        trace = trace.tb_next
    return "" if number is None else f" (line {number})"
