"""Corpus: the same scenarios for all torch versions. This process draws the scenarios, and the other interpreter checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equivcheck.campaign.batches import EndBatch, batch_seed, run_batch
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.versions.batch import run_tasks, serve_tasks
from equivcheck.quality.versions.environments import Installation
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import decode, encode, from_json, to_json

_DEADLINE = 60.0
"""Limit for one run of the ranks, in seconds; also the average limit per scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusResult:
    """Result from checking one scenario on one torch version."""

    outcome: Outcome
    """The verdict's outcome."""
    known: str = ""
    """Known issue; empty if there is no such issue."""
    reason: str = ""
    """Reason for the outcome in one sentence; empty if equivalent."""


def draw_scenarios(count: int, seed: int) -> tuple[Scenario, ...]:
    """Draw `count` different scenarios by seed. The installed torch supports all of them, and none uses `torch.compile`."""
    from equivcheck.strategies import scenarios
    from equivcheck.strategies.scenario import MORE_RESUMES

    found: dict[Scenario, None] = {}

    def take(scenario: Scenario) -> None:
        if len(found) >= count:
            raise EndBatch
        found[scenario] = None

    number = 0
    while len(found) < count:
        run_batch(scenarios(resumes=MORE_RESUMES), batch_seed(seed, number), take)
        number += 1
    return tuple(found)


def check_corpus(installation: Installation, scenarios: tuple[Scenario, ...]) -> tuple[CorpusResult, ...]:
    """Check each scenario on simulated ranks, under the installation's torch version.

    The result is `crashed` if the process dies before it reports.
    """
    tasks = [to_json(scenario) for scenario in scenarios]
    results = run_tasks(installation, __name__, tasks, seconds=_DEADLINE, ended=_crashed)
    return tuple(decode(CorpusResult, result, where="corpus") for result in results)


def main() -> None:
    """Check scenarios in an interpreter with another torch version, for the process that started it."""
    serve_tasks(_check)


def _check(task: str) -> Any:
    from equivcheck.checking.check import check

    scenario = from_json(task)
    try:
        verdict = check(scenario, deadline=_DEADLINE)
    except Exception as error:  # the checker itself failed: report it, and go on with the next scenario
        return _crashed(f"the checker raised {type(error).__name__}: {error}")
    return encode(CorpusResult(outcome=verdict.outcome, known=verdict.known, reason=verdict.reason))


def _crashed(reason: str) -> Any:
    return encode(CorpusResult(outcome=Outcome.CRASHED, reason=reason))
