"""What a rank that is a process says of a program that it has run: the value, or what was raised, as bytes."""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equivcheck.worlds.failure import causes
from equivcheck.worlds.forks import WatchedForks

if TYPE_CHECKING:
    from equivcheck.worlds.state.keeper import StateKeeper

VALUE_TAG, CHANGED_TAG, RAISED_TAG = b"v", b"c", b"e"
"""First byte of an answer: what is pickled in the rest, a value or `Raised`. After `CHANGED_TAG` it is a value, too, of a program
that has left its process so that no other can run there."""

Task = tuple[bool, Callable[..., Any], tuple[Any, ...]]
"""Whether a program is foreign, the program, and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """What a rank sends instead of a value."""

    error: str
    """``Type: message``."""
    stack: str
    """The traceback, innermost frame last."""
    when: float
    """On `time.monotonic`, which all processes of one machine share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What an answer says."""

    value: Any = None
    """What the program returned."""
    raised: Raised | None = None
    """What it raised instead; None if it returned."""


def answer(rank: int, load: Callable[[], Task]) -> bytes:
    """Run what `load` gives; the pickled value or `Raised`, each after the byte that tells them apart."""
    import torch

    from equivcheck.worlds.meshes import end_run, groups_of_rank, has_lost

    torch.default_generator.manual_seed(rank)
    try:
        is_foreign, program, arguments = load()
        state, groups = _state_keeper(), groups_of_rank()
        with state.kept() if is_foreign else contextlib.nullcontext():
            with WatchedForks():
                value = program(*arguments)
            end_run()
        is_changed = state.patched or state.lost or has_lost(groups)
        return (CHANGED_TAG if is_changed else VALUE_TAG) + _pickled(value)
    except BaseException as error:
        return RAISED_TAG + pickle.dumps(_raised(error))


def content(answered: bytes) -> Content:
    """What an answer says; a value that cannot be read here counts as raised by its rank."""
    try:
        read = pickle.loads(memoryview(answered)[1:])
    except Exception as error:
        text = f"{type(error).__name__}: the program returned a value that cannot be read: {error}"
        return Content(raised=Raised(error=text, stack="", when=time.monotonic()))
    return Content(raised=read) if answered[:1] == RAISED_TAG else Content(value=read)


@functools.cache
def _state_keeper() -> StateKeeper:
    """What keeps the state of this process."""
    from equivcheck.worlds.state.keeper import StateKeeper

    return StateKeeper()


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"the program returned a value that cannot be pickled: {type(error).__name__}: {error}") from None


def _raised(error: BaseException) -> Raised:
    when = time.monotonic()
    trace = error.__traceback__
    stack = "".join(traceback.format_exception(type(error), error, trace and trace.tb_next))
    return Raised(error=_named(error), stack=stack, when=when)


def _named(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}{causes(error)}"
    except Exception:
        return f"{type(error).__name__}: (its text cannot be had)"
