"""One rank's process: joins the gloo world and runs its owner's programs."""

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
from dataclasses import dataclass
from datetime import timedelta

from equivcheck.worlds.gloo.answer import Task, answer
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.matching.guard import guard_collectives

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""Signal to make a rank write its stacks: an unused real-time signal, or SIGUSR1 if the system has none."""
_KEPT_OUTPUT = 1 << 16
"""Size in bytes at which a rank's output file is truncated."""
_NEVER = timedelta(days=1)
"""Gloo's own time limit, long because the owner's deadline decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """First message to a rank's process: the rank's number, the world size, and the port of the store.

    The message also carries open files: for output, for stacks, the table of collectives, and on rank 0 the store's listening
    socket.
    """

    rank: int
    """Global rank, from 0."""
    size: int
    """World size."""
    port: int
    """Store port on the loopback address."""


def serve_rank(channel: Channel) -> None:
    """Join the gloo world as a rank, then run each program received from `channel` until the other end closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message, (output, stacks, table, *listener) = channel.receive_with_fds()
    place: RankAddress = pickle.loads(message)
    # Output from C++ must reach the file too, so the descriptors are replaced.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(output, 1)
    os.dup2(output, 2)
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
            channel.send(answer(place.rank, functools.partial(_loaded, request, place)))


def leave() -> None:
    """Destroy the default process group before the process exits by itself."""
    import torch.distributed as dist

    dist.destroy_process_group()


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
    """Return one rank's environment as `torchrun` sets it, because accelerate and Lightning read their world from it."""
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
    """Return the name of the loopback interface. Gloo would look up the host's name by default, and that lookup can fail."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def _loaded(request: bytes, place: RankAddress) -> Task:
    """Return the task in a request. Also applies the owner's changed import path and environment."""
    surroundings, is_user_code, task = pickle.loads(request)
    if surroundings is not None:
        sys.path[:] = surroundings.path
        os.environ.clear()
        os.environ.update({**surroundings.environment, **_own_variables(place)})
    try:
        program, arguments = pickle.loads(task)
    except Exception as error:
        error.add_note(
            "Each rank is a separate process and imports functions by module name, so their modules must be on sys.path."
        )
        raise
    return is_user_code, program, arguments
