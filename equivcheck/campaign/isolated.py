"""A check in its own process. A case that kills the process still gives a verdict."""

from __future__ import annotations

from equivcheck.campaign.messages import Broken, Checked, CheckOne
from equivcheck.campaign.plan import Check, Plan, explaining_check
from equivcheck.campaign.process import START_SECONDS, CheckingProcess
from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Case
from equivcheck.worlds.workers.process import Ended

_POLL_SECONDS = 1.0
"""Seconds between checks for a stuck process."""


class CheckerFailed(EquivCheckError):
    """The checker itself could not run. This says nothing about the case."""


def check_isolated(
    case: Case, *, world: str, deadline: float, beyond: bool = False, check: Check = explaining_check
) -> CaseVerdict:
    """Run `equivcheck.check` with a diagnosis in a new process. If the process dies or never ends, that is the verdict.

    `beyond` allows cases without torch's support. Raises `CheckerFailed`, and `UsageError` as `check` does.
    """
    plan = Plan(num_checks=1, seed=0, world=world, deadline=deadline, stuck_seconds=2 * deadline + START_SECONDS, check=check)
    worker = CheckingProcess(plan, (0, 0))
    try:
        worker.send(CheckOne(case=case, beyond=beyond))
        return _verdict(worker)
    finally:
        worker.close()


def _verdict(worker: CheckingProcess) -> CaseVerdict:
    while not worker.is_stuck:
        if not worker.poll(_POLL_SECONDS):
            continue
        message = worker.receive()
        if isinstance(message, Checked):
            return message.verdict
        if isinstance(message, Broken):
            raise UsageError(message.summary) if message.is_usage else CheckerFailed(message.summary)
        if isinstance(message, Ended):
            verdict = worker.death()
            break
    else:
        verdict = worker.hang()
    if verdict is None:
        raise CheckerFailed(f"the check's process ended before the check began: {worker.printed().strip()[-500:]}")
    return verdict
