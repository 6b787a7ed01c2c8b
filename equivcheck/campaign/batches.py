"""Runs Hypothesis to draw batches of cases. If a case fails, Hypothesis shrinks it at the end of its batch."""

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
from equivcheck.scenario.case import Checkable

C = TypeVar("C", bound=Checkable)

_BATCH = 500
"""Cases per batch."""
FRESH = 10
"""Cases per Hypothesis run; the first case is the simplest. Longer runs mostly vary earlier cases: about 70 in 500 would be new.
"""

_SETTINGS = settings(
    max_examples=FRESH,
    phases=(Phase.generate, Phase.shrink),
    database=None,  # campaigns keep their own findings
    deadline=None,
    derandomize=False,  # the seed of the batch decides
    report_multiple_bugs=False,  # a batch ends with one failure
    print_blob=False,
    suppress_health_check=tuple(HealthCheck),
    verbosity=Verbosity.quiet,
)


class FaultShown(Exception):
    """Exception that `take` raises to let Hypothesis shrink the case that it was called with.

    Hypothesis then passes smaller cases to `take`, and keeps the smallest case for which it raises.
    """


class EndBatch(BaseException):
    """Exception that `take` raises to end the batch.

    It derives from `BaseException`, because Hypothesis would shrink an `Exception`.
    """


def run_batch(strategy: SearchStrategy[C], batch_seed: int, take: Callable[[C], None]) -> None:
    """Draw a batch of cases from `strategy`, and call `take` with each. The batch ends early if `take` raises `EndBatch`.

    If `take` raises `FaultShown`, Hypothesis shrinks the case passed to it.
    """
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
    """Return a batch's seed. It depends on `campaign_seed` and on the numbers in `place`, such as worker and batch number."""
    digest = hashlib.sha256(repr((campaign_seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def draw(plan: Plan, take: Callable[[Any], None]) -> float:
    """Draw the same cases as the campaign's first worker, and call `take` with each, for `plan.seconds`.

    Returns the seconds spent on drawing.
    """
    started = time.monotonic()
    assert plan.strategy is not None
    strategy = plan.strategy(plan)

    def take_in_time(case: Checkable) -> None:
        if time.monotonic() - started >= plan.seconds:
            raise EndBatch
        take(case)

    for number in itertools.count():
        run_batch(strategy, batch_seed(plan.seed, 0, 0, number), take_in_time)
        if time.monotonic() - started >= plan.seconds:
            break
    return time.monotonic() - started
