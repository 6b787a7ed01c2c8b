"""A worker as its supervisor sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.workers.messages import CheckOne
from equivcheck.campaign.workers.process import CheckingProcess
from equivcheck.layouts.base.execution.compile_time import COMPILE_SECONDS
from equivcheck.scenario import Scenario
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

STUCK_SECONDS = 0.5
PLAN = Plan(seconds=1.0, seed=0, check=fakes.long_hangs, deadline=0.1, stuck_seconds=STUCK_SECONDS)


@contextmanager
def at_work_on(scenario: Scenario) -> Iterator[CheckingProcess]:
    """A worker that has begun a check which never ends."""
    with closing(CheckingProcess(PLAN, (0, 0))) as worker:
        worker.send(CheckOne(case=scenario))
        before = worker.seconds_since_begun
        while not worker.is_stuck and (now := worker.seconds_since_begun) >= before:
            before = now
            worker.poll(0.01)
        yield worker


def test_a_worker_that_compiles_is_not_taken_to_be_stuck() -> None:
    """A compiled scenario may take minutes longer than others."""
    with at_work_on(fakes.scenario(steps=5)) as eager, at_work_on(fakes.compiled()) as compiled:
        while not eager.is_stuck:
            time.sleep(0.01)
        assert not compiled.is_stuck
        assert compiled.allowed_seconds > COMPILE_SECONDS


def test_a_worker_that_has_not_begun_may_take_its_time_to_start() -> None:
    """Imports on a busy machine take longer than a check may."""
    with closing(CheckingProcess(PLAN, (0, 0))) as worker:
        time.sleep(2 * STUCK_SECONDS)
        assert not worker.is_stuck
