"""Sends whole messages over a Unix socket, optionally with file descriptors and a time limit."""

from __future__ import annotations

import socket
import struct
import time

_HEADER = struct.Struct("!QB")
_NO_TIME_LEFT = 1e-4
"""Timeout in seconds after the limit has passed; zero would make the socket non-blocking."""


class Channel:
    """One end of a socket pair. Every operation raises `EOFError` or `OSError` if the other end is closed."""

    __slots__ = ("_socket",)

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Create two connected channels."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one), cls(other)

    @classmethod
    def of(cls, fd: int) -> Channel:
        """Return a channel for a socket's open file descriptor. `close` closes the descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """The socket's file descriptor; -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end of the connection. A second call has no effect."""
        self._socket.close()

    def send(self, payload: bytes, fds: tuple[int, ...] = (), *, until: float | None = None) -> None:
        """Send one message. Raises `TimeoutError` if `until` (on `time.monotonic`) passes first."""
        self._limit(until)
        header = _HEADER.pack(len(payload), len(fds))
        if fds:
            socket.send_fds(self._socket, [header], fds)
            self._socket.sendall(payload)
        else:
            self._socket.sendall(header + payload)

    def receive(self, *, until: float | None = None) -> bytes:
        """Wait for one message without file descriptors. Raises `TimeoutError` if `until` passes first."""
        return self.receive_with_fds(until=until)[0]

    def receive_with_fds(self, *, until: float | None = None) -> tuple[bytes, tuple[int, ...]]:
        """Wait for one message and its file descriptors. The caller must close the descriptors."""
        self._limit(until)
        header, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, 8)
        header += self._exactly(_HEADER.size - len(header))
        length, num_fds = _HEADER.unpack(header)
        assert len(fds) == num_fds
        return self._exactly(length), tuple(fds)

    def _limit(self, until: float | None) -> None:
        self._socket.settimeout(None if until is None else max(until - time.monotonic(), _NO_TIME_LEFT))

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError("the process at the other end closed the channel")
            view = view[received:]
        return bytes(data)
