"""Places in the user's code: frames in a printed stack, and the module in which an exception was raised."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from equivcheck.errors import EquivCheckError
from equivcheck.user.traces.names import TensorNames

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)(?:\n    (?! *File ")(.*))?$', re.MULTILINE)
"""One frame in a printed stack: file, line, function, and its code if the file can be read."""
_NEXT_EXCEPTION = "Traceback (most recent call last):"
_OWN = (f"{Path(__file__).parents[1]}{os.sep}", "site-packages/equivcheck/")
_TORCH = (f"{Path(torch.__file__).parent}{os.sep}", "site-packages/torch/")
"""Path prefixes of torch's files. Packages on another host may be in another folder."""
_LIBRARIES = ("site-packages", "dist-packages")
_PYTHON = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
_PARALLEL = tuple(f"{folder}distributed{os.sep}" for folder in _TORCH)
_CALLS = ("_call_impl", "forward")
"""Functions in `nn.Module` whose `self` is the running module. Hooks run inside the first of them."""
_MODULE = re.compile(r"\nin your ((?:module \S+|model) \(\w+\))")
"""Note added by `module_in_errors`, as it is printed after the error's text."""

_Frame = Sequence[str]
"""File, line, function and code."""


def place_lines(stack: str) -> list[str]:
    """Return the deepest frame in the user's code from a printed stack: ``train.py:24, in forward``, then its line of code.

    If a library such as transformers is deeper, its deepest frame follows. If all frames are in torch, return the deepest frame.
    Empty for an empty stack.
    """
    exceptions: list[list[_Frame]] = [
        [frame for frame in _FRAME.findall(part) if not _is_in(frame, _OWN)] for part in stack.split(_NEXT_EXCEPTION)
    ]
    for frames in reversed(exceptions):  # an exception's causes are printed before it
        called = [frame for frame in frames if not _is_in(frame, _TORCH) and not _is_python(frame)]
        users = [index for index, frame in enumerate(called) if not _is_in(frame, _LIBRARIES)]
        if called:
            beyond = called[users[-1] + 1 :] if users else called
            deepest = [called[index] for index in users[-1:]] + beyond[-1:]
            return [line for frame in deepest for line in _lines(frame)]
    return [line for frame in exceptions[-1][-1:] for line in _lines(frame)]


def deepest_line(frames: Sequence[traceback.FrameSummary], *libraries: str) -> str:
    """Return the deepest line in the user's code, such as ```loss.backward()` (train.py:24)``. Empty if there is none.

    Frames in torch, in equivcheck, and in `libraries` (prefixes of paths) are not the user's.
    """
    users = [frame for frame in frames if not _is_in((frame.filename,), (*_OWN, *_TORCH, *libraries))]
    return f"`{users[-1].line}` ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""


def _is_in(frame: _Frame, folders: tuple[str, ...]) -> bool:
    return any(folder in frame[0] for folder in folders)


def _is_python(frame: _Frame) -> bool:
    return _is_in(frame, _PYTHON) and not _is_in(frame, _LIBRARIES)


def _lines(frame: _Frame) -> list[str]:
    file, line, function, code = frame
    with contextlib.suppress(OSError, ValueError):  # the current folder may be gone, or the file outside
        file = str(Path(file).relative_to(Path.cwd()))
    return [f"{file}:{line}, in {function}", *([f"  {code.strip()}"] if code.strip() else [])]


@contextlib.contextmanager
def module_in_errors(names: TensorNames, module: nn.Module) -> Iterator[None]:
    """Inside the context, add a note with a module's name to an exception.

    The module is the one whose forward raised, or that torch was parallelizing. The printed stack contains the note, so another
    process can read it.
    """
    try:
        yield
    except EquivCheckError:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # an exception may refuse notes, and must arrive in any case
            _add_module(error, {id(part): (name, part) for name, part in names.all_modules(module)})
        raise


def _add_module(error: Exception, modules: dict[int, tuple[str, nn.Module]]) -> None:
    """Add the name of the deepest module whose forward or hook ran. A module that torch was parallelizing counts too."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in _CALLS:
            found = modules.get(id(frame.f_locals.get("self")), found)
        elif _is_in((frame.f_code.co_filename,), _PARALLEL):
            found = modules.get(id(frame.f_locals.get("module")), found)
    if found is not None:
        name, part = found
        kind = type(part).__name__
        error.add_note(f"in your module {name} ({kind})" if name else f"in your model ({kind})")


def module_in(stack: str) -> str:
    """Return the module that `module_in_errors` named in a printed stack, such as ``module head (Linear)``; empty if none."""
    return "".join(_MODULE.findall(stack)[-1:])


def without_module(error: str) -> str:
    """Return an error's text without the note that `module_in_errors` added."""
    return _MODULE.sub("", error)
