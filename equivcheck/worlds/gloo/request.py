"""What the owner sends to ranks: the task, pickled once for all of them, and `sys.path` when it has changed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equivcheck.errors import UsageError


def packed(program: Callable[..., Any], arguments: tuple[Any, ...], *, is_foreign: bool = True) -> bytes:
    """The task as bytes; raises `UsageError` when it cannot be sent.

    What users write may be a closure, or lie in the main script, which ranks never run again: such code is sent itself.
    """
    try:
        return copied((program, arguments)) if is_foreign else pickle.dumps((program, arguments), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UsageError(f"gloo: the program {program!r} or its arguments cannot be pickled: {error}") from error


def copied(value: object) -> bytes:
    """What `pickle.loads` makes a copy from in another process; code that no module has by name goes with it.

    Raises what pickling raises.
    """
    import cloudpickle  # for programs of users alone

    code: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return code


def request(task: bytes, path: tuple[str, ...] | None, *, is_foreign: bool = True) -> bytes:
    """The message that a rank gets."""
    return pickle.dumps((path, is_foreign, task), pickle.HIGHEST_PROTOCOL)


def import_path() -> tuple[str, ...]:
    """`sys.path` as another process can use it."""
    return tuple(entry if entry.startswith("/") else str(Path.cwd() / entry) for entry in sys.path)
