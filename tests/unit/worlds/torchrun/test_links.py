"""Processes in a world find each other."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from equivcheck.worlds.failure import RanksDidNotStart
from equivcheck.worlds.torchrun.links import LOST, Entrance, Link, connect_to_leader, send_message

HOST = "127.0.0.1"
LIMIT = 60.0
"""Seconds for operations that take almost none; only a connection that never closes uses them up."""


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    """An entrance that is closed afterwards."""
    opened = Entrance()
    yield opened
    opened.close()


def admitted(entrance: Entrance, size: int) -> tuple[threading.Thread, dict[int, tuple[Link, str]]]:
    """A thread admitting connections, and its table of them."""
    found: dict[int, tuple[Link, str]] = {}
    thread = threading.Thread(target=lambda: found.update(entrance.admit(size)), daemon=True)
    thread.start()
    return thread, found


def test_those_who_know_the_secret_come_in(entrance: Entrance) -> None:
    """Each other rank has a connection and a host name; messages arrive, and a closed end is noticed."""
    thread, found = admitted(entrance, 3)
    ends = {rank: connect_to_leader(entrance.address(HOST), rank) for rank in (2, 1)}
    thread.join()

    assert {rank: host for rank, (_, host) in found.items()} == dict.fromkeys((1, 2), socket.gethostname())
    for rank, end in ends.items():
        assert send_message(found[rank][0], "run", rank)
        assert end.recv() == ("run", rank)
        end.close()
        with pytest.raises(LOST):
            found[rank][0].recv()
        found[rank][0].close()


def test_strangers_do_not(entrance: Entrance) -> None:
    """Connections with another secret, another message or no message are dropped, and delay nobody."""
    host, port, _ = json.loads(entrance.address(HOST))
    thread, found = admitted(entrance, 2)
    wrong = connect_to_leader(json.dumps((host, port, "guessed")).encode(), 1)
    loud, silent = (socket.create_connection((host, port)) for _ in range(2))
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert wrong.poll(LIMIT)
    with pytest.raises(LOST):
        wrong.recv()

    right = connect_to_leader(entrance.address(HOST), 1)
    thread.join()

    assert list(found) == [1]
    assert send_message(found[1][0], "run")
    assert right.recv() == ("run", None)
    assert silent.recv(1) == b""
    for end in (wrong, right, found[1][0], loud, silent):
        end.close()


def test_nobody_at_the_address_is_told(entrance: Entrance) -> None:
    """A process that cannot reach rank 0 reports itself and the address."""
    host, port, secret = json.loads(entrance.address(HOST))
    entrance.close()
    with pytest.raises(RanksDidNotStart, match=rf"rank 1 on .+ cannot reach rank 0 at {host}:{port}"):
        connect_to_leader(json.dumps((host, port, secret)).encode(), 1)
