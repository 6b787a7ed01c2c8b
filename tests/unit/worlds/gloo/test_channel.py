"""Messages between processes."""

from __future__ import annotations

import os
import time

import pytest

from equivcheck.worlds.gloo.channel import Channel


def test_messages_keep_their_bounds() -> None:
    """Each sent message is received as one, also an empty one."""
    one, other = Channel.pair()
    for message in (b"first", b"", bytes(10_000)):
        one.send(message)
    assert [other.receive() for _ in range(3)] == [b"first", b"", bytes(10_000)]
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def test_files_travel() -> None:
    """An open file sent with a message is usable at the other end."""
    one, other = Channel.pair()
    read, write = os.pipe()
    one.send(b"take it", (write,))
    message, (copy,) = other.receive_with_fds()
    os.write(copy, b"through")
    assert (message, os.read(read, 100)) == (b"take it", b"through")
    for fd in (read, write, copy):
        os.close(fd)
    one.close()
    other.close()


def test_limits_hold() -> None:
    """Neither a silent nor a busy other end blocks beyond the limit."""
    one, other = Channel.pair()
    with pytest.raises(TimeoutError):
        one.receive(until=time.monotonic() + 0.01)
    with pytest.raises(TimeoutError):
        one.send(bytes(10_000_000), until=time.monotonic() + 0.01)
    one.close()
    other.close()
