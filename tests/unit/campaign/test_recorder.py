"""The scenario that outlives its worker."""

from __future__ import annotations

import os

from equivcheck.campaign.recorder import Recorder
from equivcheck.scenario import Scenario
from unit.campaign import fakes


def test_the_last_scenario_can_be_read_by_another_owner_of_the_file() -> None:
    """What was begun last is read back whole, through the file descriptor that a worker gets."""
    recorder = Recorder.create()
    other = Recorder.inherited(os.dup(recorder.fd))
    for width in (32, 1):
        other.begin(fakes.scenario(width=width, layers=5 if width > 1 else 1))
    assert recorder.last() == fakes.scenario(width=1)
    assert recorder.num_begun == 2
    recorder.close()
    other.close()


def test_nothing_is_there_before_the_first_check() -> None:
    """A worker that has begun nothing leaves no scenario."""
    recorder = Recorder.create()
    assert recorder.last() is None
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
    assert recorder.last() is None
    assert recorder.num_begun == 2
    recorder.close()
