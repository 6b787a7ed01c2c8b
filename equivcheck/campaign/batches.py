"""Cases from Hypothesis, in batches, with its own shrinking for the one failure that a batch may end with."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.plan import Plan
from equivcheck.scenario.case import Case

C = TypeVar("C", bound=Case)

_BATCH = 500
"""Cases a batch."""
FRESH = 10
"""Cases that Hypothesis draws afresh, the first of them the plainest. Beyond those it mostly varies what it has drawn, six
times each, one part copied over another: of five hundred some seventy would be new."""

_SETTINGS = settings(
    max_examples=FRESH,
    phases=(Phase.generate, Phase.shrink),
    database=None,
    deadline=None,
    derandomize=False,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=tuple(HealthCheck),
    verbosity=Verbosity.quiet,
)


class FaultShown(Exception):
    """Raised by what takes cases to have the one of this moment shrunk: smaller ones that raise it too are looked for."""


class EndBatch(BaseException):
    """Raised by what takes cases to end the batch at once; no `Exception`, which Hypothesis would shrink."""


def run_batch(strategy: SearchStrategy[C], batch_seed: int, take: Callable[[C], None]) -> None:
    """Take drawn cases until the batch is over, `take` raises `EndBatch`, or what raised `FaultShown` has been shrunk."""
    with contextlib.suppress(EndBatch, FaultShown, Flaky):
        for number in range(_BATCH // FRESH):
            _run_fresh(strategy, batch_seed + number, take)


def _run_fresh(strategy: SearchStrategy[C], run_seed: int, take: Callable[[C], None]) -> None:
    @seed(run_seed)
    @_SETTINGS
    @given(strategy)
    def run(case: C) -> None:
        take(case)

    run()


def batch_seed(campaign_seed: int, *place: int) -> int:
    """A seed for a batch: of a campaign's seed, a worker, which of that worker's processes it is, and the number of the batch."""
    digest = hashlib.sha256(repr((campaign_seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def draw(plan: Plan, take: Callable[[Any], None]) -> float:
    """Have cases taken for the plan's seconds, each once a batch, by one process; returns how long it took.

    They are those of the first worker of a campaign with that plan.
    """
    started = time.monotonic()
    assert plan.strategy is not None
    strategy = plan.strategy(plan)

    def take_in_time(case: Case) -> None:
        if time.monotonic() - started >= plan.seconds:
            raise EndBatch
        take(case)

    for number in itertools.count():
        run_batch(strategy, batch_seed(plan.seed, 0, 0, number), take_in_time)
        if time.monotonic() - started >= plan.seconds:
            break
    return time.monotonic() - started
