"""Connections between rank 0 and the other processes of a world: whole messages, and an error where the other end is gone.

What comes from a connection is unpickled, so it must say a secret first, which rank 0 hands out by the store of the world.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from equivcheck.worlds.failure import RanksDidNotStart

START_SECONDS = 300.0
"""On the wall, for all processes to find each other: nobody knows what those do that are missing."""
SILENT_SECONDS = 120
"""A host that confirms nothing for so long is gone; of a process that ended, its host tells at once."""
_PROBE_SECONDS = 15
_LONGEST_GREETING = 4096

Link = Connection
"""One end; `send` and `recv` raise `EOFError` or `OSError` when the other is gone."""
LOST = (EOFError, OSError)
"""What they raise."""


class Entrance:
    """Where rank 0 lets the others in."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)
        self._secret = secrets.token_hex()

    def address(self, host: str) -> bytes:
        """What the others need to know."""
        return json.dumps((host, self._socket.getsockname()[1], self._secret)).encode()

    def admit(self, size: int) -> dict[int, tuple[Link, str]]:
        """The link of each other rank, and its host's name. Raises `RanksDidNotStart`."""
        until = time.monotonic() + START_SECONDS
        admitted: dict[int, tuple[Link, str]] = {}
        strangers: set[socket.socket] = set()
        while len(admitted) < size - 1:
            ready = wait([self._socket, *strangers], max(0.0, until - time.monotonic()))
            if not ready:
                missing = sorted(set(range(1, size)) - set(admitted))
                raise RanksDidNotStart(f"world torchrun: ranks {missing} have not come within {START_SECONDS:g} s")
            if self._socket in ready:
                strangers.add(self._socket.accept()[0])
            for stranger in strangers.intersection(ready):
                strangers.remove(stranger)
                admitted.update(self._greeted(stranger))
        for stranger in strangers:
            stranger.close()
        return admitted

    def _greeted(self, stranger: socket.socket) -> dict[int, tuple[Link, str]]:
        """The link of one that has said something, if that was the secret; what is short comes in one piece."""
        with contextlib.suppress(OSError, TypeError, ValueError):
            rank, host, secret = json.loads(stranger.recv(_LONGEST_GREETING))
            if hmac.compare_digest(str(secret).encode(), self._secret.encode()):
                return {int(rank): (_link(stranger), str(host))}
        stranger.close()
        return {}

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def entered(address: bytes, rank: int) -> Link:
    """The other end, of a process that was told the address. Raises `RanksDidNotStart`."""
    host, port, secret = json.loads(address)
    try:
        end = socket.create_connection((host, port), START_SECONDS)
        end.sendall(json.dumps((rank, socket.gethostname(), secret)).encode())
    except OSError as error:
        ours = f"rank {rank} on {socket.gethostname()}"
        raise RanksDidNotStart(f"world torchrun: {ours} cannot reach rank 0 at {host}:{port}: {error}") from error
    return _link(end)


def _link(end: socket.socket) -> Link:
    """A connection that breaks when the other host is gone, not only when its process ends."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _PROBE_SECONDS, "TCP_KEEPINTVL": _PROBE_SECONDS, "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS}
    for name, value in options.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(end.detach())


def told(link: Link, verb: str, payload: Any = None) -> bool:
    """Send a message; whether anybody is there to get it."""
    try:
        link.send((verb, payload))
    except OSError:
        return False
    return True
