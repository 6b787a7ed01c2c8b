"""What the owner sends to ranks: the task, pickled once for all of them, and `sys.path` when it has changed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equivcheck.errors import UsageError


def packed(program: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """The task as bytes; raises `UsageError` when it cannot be sent, or would not be found on the other side."""
    if getattr(program, "__module__", None) == "__main__":
        raise UsageError(
            f"gloo: the program {program!r} is in the main script, which ranks never run again; "
            "allowed: a function of an importable module"
        )
    try:
        return pickle.dumps((program, arguments), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UsageError(f"gloo: the program {program!r} or its arguments cannot be pickled: {error}") from error


def request(task: bytes, path: tuple[str, ...] | None, *, is_foreign: bool = True) -> bytes:
    """The message that a rank gets."""
    return pickle.dumps((path, is_foreign, task), pickle.HIGHEST_PROTOCOL)


def import_path() -> tuple[str, ...]:
    """`sys.path` as another process can use it."""
    return tuple(entry if entry.startswith("/") else str(Path.cwd() / entry) for entry in sys.path)
