"""Time measured as work."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from equivcheck.worlds import work_clock
from equivcheck.worlds.work_clock import WorkClock


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read other processes at each reading of the clock."""
    monkeypatch.setattr(work_clock, "_LOOK_SECONDS", 0.0)


def test_computing_counts_and_sleeping_does_not() -> None:
    """A process that has to wait for a core has not worked longer."""
    clock = WorkClock()
    time.sleep(0.5)
    slept = clock.seconds
    while clock.seconds < slept + 0.1:
        pass
    assert slept < 0.5


def test_what_a_child_computes_counts_before_and_after_its_end() -> None:
    """Ranks as processes work for the process that waits for them; nothing is counted twice or lost."""
    clock = WorkClock()
    code = "import time\nwhile time.process_time() < 1.0: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    running = clock.seconds
    child.communicate(b"\n")
    ended = clock.seconds
    assert 0.9 <= running <= ended < 2 * running


def test_what_was_waited_is_counted_when_told() -> None:
    """Hung ranks use up time without computing."""
    clock = WorkClock()
    clock.wait(600.0)
    assert clock.seconds >= 600.0
