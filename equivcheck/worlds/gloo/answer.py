"""Runs a program in a rank's process and encodes its result or exception as bytes."""

from __future__ import annotations

import contextlib
import functools
import pickle
import struct
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equivcheck.worlds.failure import causes
from equivcheck.worlds.processes.forks import WatchedForks

if TYPE_CHECKING:
    from equivcheck.worlds.state.keeper import StateKeeper

VALUE_TAG, CHANGED_TAG, RAISED_TAG = b"v", b"c", b"e"
"""First byte of an answer: a value, a value after which the process is unusable, or a `Raised`."""

NUMBERS_OF_GROUPS = struct.Struct(">II")
"""Struct for the rank's `numbers_of_groups`. It follows the first byte of an answer, except after `RAISED_TAG`."""

Task = tuple[bool, Callable[..., Any], tuple[Any, ...]]
"""Tuple for a task: whether the program is the user's, the program, and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Exception from a rank's program, sent instead of a value."""

    error: str
    """Error as ``Type: message``."""
    stack: str
    """Traceback, innermost frame last."""
    when: float
    """Time on `time.monotonic`, shared by all processes on a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The decoded answer of one rank: the program's return value or its exception."""

    value: Any = None
    """Program's return value."""
    raised: Raised | None = None
    """Exception raised by the program; None if it returned."""


def answer(rank: int, load: Callable[[], Task]) -> bytes:
    """Run the task returned by `load`, and return the answer of `rank` as bytes.

    The answer contains the pickled return value, or a pickled `Raised` if the task raised. Its first byte tells these two apart.
    """
    import torch

    from equivcheck.worlds.meshes import end_run, groups_of_rank, has_lost_groups, numbers_of_groups
    from equivcheck.worlds.processes.run_store import prefixed_store_keys

    torch.default_generator.manual_seed(rank)
    try:
        is_user_code, program, arguments = load()
        state, groups = _state_keeper(), groups_of_rank()
        with state.kept() if is_user_code else contextlib.nullcontext():
            with WatchedForks(), prefixed_store_keys():
                value = program(*arguments)
            end_run()
        is_changed = state.patched or state.lost or has_lost_groups(groups)
        tag = CHANGED_TAG if is_changed else VALUE_TAG
        return tag + NUMBERS_OF_GROUPS.pack(*numbers_of_groups()) + _pickled(value)
    except BaseException as error:
        return RAISED_TAG + pickle.dumps(_raised(error))


def content(answered: bytes) -> Content:
    """Decode the bytes that `answer` returned on a rank.

    If the return value cannot be unpickled in this process, the result contains an exception instead.
    """
    has_raised = answered[:1] == RAISED_TAG
    try:
        read = pickle.loads(memoryview(answered)[1 if has_raised else 1 + NUMBERS_OF_GROUPS.size :])
    except Exception as error:
        text = f"{type(error).__name__}: the program returned a value that cannot be read: {error}"
        return Content(raised=Raised(error=text, stack="", when=time.monotonic()))
    return Content(raised=read) if has_raised else Content(value=read)


def leave_ranks_changed(answers: Iterable[bytes]) -> bool:
    """Whether the ranks that sent these answers must be restarted before they can run another program.

    They must if a program changed torch's state, or if ranks created unequal numbers of process groups. In the latter case,
    ranks would name the next group differently and wait for each other forever.
    """
    values = [answered for answered in answers if answered[:1] != RAISED_TAG]
    numbers = {NUMBERS_OF_GROUPS.unpack_from(answered, 1) for answered in values}
    return len(numbers) > 1 or any(answered[:1] == CHANGED_TAG for answered in values)


@functools.cache
def _state_keeper() -> StateKeeper:
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
        return f"{type(error).__name__}: (its text cannot be read)"
