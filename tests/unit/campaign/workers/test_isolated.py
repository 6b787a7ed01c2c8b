"""One check in a process of its own."""

from __future__ import annotations

import pytest

from equivcheck.campaign.workers.process import CheckerFailed, check_isolated
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.worlds.workers.fork_server import WorkerForkServer, forked_workers
from equivcheck.worlds.workers.process import worker_environment
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

SCENARIO = fakes.scenario(steps=5)


def test_a_verdict_comes_back() -> None:
    """What the check returns in its process is what the caller gets."""
    assert check_isolated(SCENARIO, world="sim", deadline=5.0, check=fakes.wide_diverges).outcome is Outcome.EQUIVALENT


@pytest.mark.usefixtures("workers_are_new")
def test_a_check_begins_as_soon_as_its_process_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that it is forked from still imports when it is asked for the first time."""
    answers, is_ready = iter([False]), WorkerForkServer.is_ready.fget
    assert is_ready is not None
    monkeypatch.setattr(WorkerForkServer, "is_ready", property(lambda server: next(answers, True) and is_ready(server)))
    with forked_workers("unit.worlds.workers.quick", worker_environment()):
        assert check_isolated(SCENARIO, world="sim", deadline=1.0, check=fakes.wide_diverges).outcome is Outcome.EQUIVALENT


def test_the_death_of_the_process_is_a_verdict() -> None:
    """A check that takes its process down gives CRASHED, with how it ended."""
    verdict = check_isolated(SCENARIO, world="sim", deadline=5.0, check=fakes.long_is_killed)
    assert verdict.outcome is Outcome.CRASHED
    assert "SIGSEGV" in verdict.reason
    assert verdict.scenario == SCENARIO


def test_a_check_that_raises_is_no_verdict() -> None:
    """A broken checker raises, one line."""
    with pytest.raises(CheckerFailed, match=r"^RuntimeError: no such thing$"):
        check_isolated(SCENARIO, world="sim", deadline=5.0, check=fakes.raises)
