"""Rank threads, as the operating system sees them."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from equivcheck.system.threads import wait_for_end_of
from equivcheck.worlds.sim.ranks import SimRanks


def backward() -> int:
    """Create torch's per-thread state, and return the thread's number."""
    torch.ones(2, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    return threading.get_native_id()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells of threads")
def test_closed_ranks_have_ended_for_the_operating_system_too() -> None:
    """Per-thread state is freed by torch after Python has finished the thread; a process must not end in between."""
    left = []
    for _ in range(20):
        ranks = SimRanks(4)
        numbers = ranks.run(backward).values
        ranks.close()
        left += [number for number in numbers if os.path.exists(f"/proc/self/task/{number}")]
    assert not left


def test_what_does_not_end_is_waited_for_only_so_long() -> None:
    """A rank that computes forever does not block closing a world."""
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    wait_for_end_of(thread, 0.01)
    assert thread.is_alive()
    release.set()
    wait_for_end_of(thread, 60.0)
    assert not thread.is_alive()
