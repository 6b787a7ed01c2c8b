"""The scenario that outlives its worker."""

from __future__ import annotations

import os
import tempfile
from functools import partial

import pytest

from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.scenario import Scenario
from unit.campaign import fakes


def test_the_last_scenario_can_be_read_by_another_owner_of_the_file() -> None:
    """What was begun last is read back whole, through the file descriptor that a worker gets."""
    recorder = Recorder.create()
    other = Recorder.open_inherited(os.dup(recorder.fd))
    for width in (32, 1):
        other.begin(fakes.scenario(width=width, layers=5 if width > 1 else 1))
    assert recorder.last_case() == fakes.scenario(width=1)
    assert recorder.num_begun == 2
    recorder.close()
    other.close()


def test_nothing_is_there_before_the_first_check() -> None:
    """A worker that has begun nothing leaves no scenario."""
    recorder = Recorder.create()
    assert recorder.last_case() is None
    assert recorder.num_begun == 0
    recorder.close()


class Huge(Scenario):
    """A scenario too large for the recorder."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("x" * 100_000,)


def test_a_scenario_that_does_not_fit_is_counted_but_not_read() -> None:
    """Size is no reason to fail: the worker is seen to be alive."""
    recorder = Recorder.create()
    small = fakes.scenario()
    recorder.begin(small)
    recorder.begin(Huge(training=small.training, layout=small.layout))
    assert recorder.last_case() is None
    assert recorder.num_begun == 2
    recorder.close()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_recorder_has_its_space_before_it_is_written_to(monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    """A disk that fills up later does not end the processes that share it."""
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    recorder = Recorder.create()
    assert os.fstat(recorder.fd).st_blocks * 512 >= 1 << 16
    recorder.close()


def test_a_full_disk_stops_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no file where the system has memory without a name."""
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "r+b"))
    recorder = Recorder.create()
    recorder.begin(fakes.scenario())
    assert recorder.last_case() == fakes.scenario()
    recorder.close()
