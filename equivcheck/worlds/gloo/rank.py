"""One rank's process: joins the gloo world, then runs the programs that its owner sends."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from equivcheck.worlds.failure import causes
from equivcheck.worlds.forks import WatchedForks
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.matching.guard import guard_collectives

if TYPE_CHECKING:
    from equivcheck.worlds.state.keeper import StateKeeper

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""Makes a rank write its stacks: a real-time signal that nothing else uses, or SIGUSR1 where the system has none."""
VALUE_TAG, CHANGED_TAG, RAISED_TAG = b"v", b"c", b"e"
"""First byte of an answer: what is pickled in the rest, a value or `Raised`. After `CHANGED_TAG` it is a value, too, of a program
that has left its process so that no other can run there."""
_KEPT_OUTPUT = 1 << 16
"""Bytes that a rank's output file may hold before it starts afresh."""
_NEVER = timedelta(days=1)
"""Gloo's own time limit: out of the way, as the owner's deadline decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """Where a rank belongs: the first message it gets.

    Attached are its output file, its stack file, the table of collectives, and for rank 0 the listening socket of the store.
    """

    rank: int
    """Global rank, from 0."""
    size: int
    """Number of ranks."""
    port: int
    """Of the store, on the loopback address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """What a rank sends instead of a value."""

    error: str
    """``Type: message``."""
    stack: str
    """The traceback, innermost frame last."""
    when: float
    """On `time.monotonic`, which all processes of one machine share."""


def serve_rank(channel: Channel) -> None:
    """Join, then run program after program until the owner closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message, (output, stacks, table, *listener) = channel.receive_with_fds()
    place: RankAddress = pickle.loads(message)
    _redirect(output)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    _join(place, *listener)
    journal = guard_collectives(place.rank, table, channel)
    channel.send(threading.get_ident().to_bytes(8, "big"))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = channel.receive()
            if os.fstat(output).st_size > _KEPT_OUTPUT:
                os.ftruncate(output, 0)
            journal.begin()
            channel.send(_answer(request, place))


def leave() -> None:
    """Undo the joining; for processes that end by themselves."""
    import torch.distributed as dist

    dist.destroy_process_group()


def _redirect(output: int) -> None:
    """No input, and everything that is printed, by C++ as well, into the file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _join(place: RankAddress, listener: int | None = None) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from equivcheck.worlds.meshes import end_run

    random.seed(place.rank)  # Python seeds it from the clock in each process that is forked
    np.random.seed(place.rank)
    os.environ.update(_own_variables(place))
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        place.port,
        place.size,
        is_master=listener is not None,
        timeout=_NEVER,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=_NEVER)
    end_run()


@functools.cache
def _own_variables(place: RankAddress) -> dict[str, str]:
    """The environment of one rank, as `torchrun` sets it: accelerate and Lightning look there for a world."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        "GLOO_SOCKET_IFNAME": _loopback(),
    }


def _loopback() -> str:
    """The loopback interface: gloo's default is to look up the host's name, which need not resolve."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def _answer(request: bytes, place: RankAddress) -> bytes:
    """Run what `request` holds; the pickled value or `Raised`, each after the byte that tells them apart."""
    import torch

    from equivcheck.worlds.meshes import end_run, groups_of_rank, has_lost

    torch.default_generator.manual_seed(place.rank)
    try:
        is_foreign, program, arguments = _loaded(request, place)
        state, groups = _state_keeper(), groups_of_rank()
        with state.kept() if is_foreign else contextlib.nullcontext():
            with WatchedForks():
                value = program(*arguments)
            end_run()
        is_changed = state.patched or state.lost or has_lost(groups)
        return (CHANGED_TAG if is_changed else VALUE_TAG) + _pickled(value)
    except BaseException as error:
        return RAISED_TAG + pickle.dumps(_raised(error))


@functools.cache
def _state_keeper() -> StateKeeper:
    """What keeps the state of this process."""
    from equivcheck.worlds.state.keeper import StateKeeper

    return StateKeeper()


def _loaded(request: bytes, place: RankAddress) -> tuple[bool, Any, tuple[Any, ...]]:
    """Whether the program is foreign, the program, and its arguments."""
    surroundings, is_foreign, task = pickle.loads(request)
    if surroundings is not None:
        sys.path[:] = surroundings.path
        os.environ.clear()
        os.environ.update({**surroundings.environment, **_own_variables(place)})
    try:
        program, arguments = pickle.loads(task)
    except Exception as error:
        error.add_note("A rank is a process of its own: what modules define it imports by name, and they must be on sys.path.")
        raise
    return is_foreign, program, arguments


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
