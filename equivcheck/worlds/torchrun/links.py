"""Connections between rank 0 and the other processes of a torchrun world. Using one raises an error if the other end has ended.

Messages are unpickled, so a new connection must first send a secret, which rank 0 publishes in the world's store.
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
"""Wall-clock seconds for all processes to find each other; wall time, because missing processes cannot be observed."""
SILENT_SECONDS = 120
"""Seconds without confirmation after which a host counts as lost. The end of a process is reported by its host at once."""
_PROBE_SECONDS = 15
_LONGEST_GREETING = 4096

Link = Connection
"""One end of a connection; `send` and `recv` raise `EOFError` or `OSError` if the other end has ended."""
LOST = (EOFError, OSError)
"""Errors from a lost connection."""


class Entrance:
    """Rank 0's listening socket for connections from all other ranks."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)
        self._secret = secrets.token_hex()

    def address(self, host: str) -> bytes:
        """Return host, port and secret as JSON. Other ranks need them to connect."""
        return json.dumps((host, self._socket.getsockname()[1], self._secret)).encode()

    def admit(self, size: int) -> dict[int, tuple[Link, str]]:
        """Wait until all other ranks have connected. Return each rank's connection and host name.

        Raises `RanksDidNotStart` if a rank does not connect in time.
        """
        until = time.monotonic() + START_SECONDS
        admitted: dict[int, tuple[Link, str]] = {}
        strangers: set[socket.socket] = set()
        while len(admitted) < size - 1:
            ready = wait([self._socket, *strangers], max(0.0, until - time.monotonic()))
            if not ready:
                missing = sorted(set(range(1, size)) - set(admitted))
                raise RanksDidNotStart(f"world torchrun: ranks {missing} did not connect within {START_SECONDS:g} s")
            if self._socket in ready:
                strangers.add(self._socket.accept()[0])
            for stranger in strangers.intersection(ready):
                strangers.remove(stranger)
                admitted.update(self._greeted(stranger))
        for stranger in strangers:
            stranger.close()
        return admitted

    def _greeted(self, stranger: socket.socket) -> dict[int, tuple[Link, str]]:
        """Return the connection to a process after it sent the secret, else nothing.

        A greeting is short enough to arrive in one piece.
        """
        with contextlib.suppress(OSError, TypeError, ValueError):
            rank, host, secret = json.loads(stranger.recv(_LONGEST_GREETING))
            if hmac.compare_digest(str(secret).encode(), self._secret.encode()):
                return {int(rank): (_link(stranger), str(host))}
        stranger.close()
        return {}

    def close(self) -> None:
        """Stop listening for connections. Existing connections stay open."""
        self._socket.close()


def connect_to_leader(address: bytes, rank: int) -> Link:
    """Connect to rank 0 at an address from `Entrance.address`. Raises `RanksDidNotStart` if rank 0 cannot be reached."""
    host, port, secret = json.loads(address)
    try:
        end = socket.create_connection((host, port), START_SECONDS)
        end.sendall(json.dumps((rank, socket.gethostname(), secret)).encode())
    except OSError as error:
        ours = f"rank {rank} on {socket.gethostname()}"
        raise RanksDidNotStart(f"world torchrun: {ours} cannot reach rank 0 at {host}:{port}: {error}") from error
    return _link(end)


def _link(end: socket.socket) -> Link:
    """Return a connection that breaks if the other host is lost, not only if its process ends."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _PROBE_SECONDS, "TCP_KEEPINTVL": _PROBE_SECONDS, "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS}
    for name, value in options.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(end.detach())


def send_message(link: Link, verb: str, payload: Any = None) -> bool:
    """Send a message, and return whether the connection was still open. `verb` is the kind of message, such as ``run``."""
    try:
        link.send((verb, payload))
    except OSError:
        return False
    return True
