"""Property tests of cases that are drawn afresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.batches import FRESH

_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def drawn_afresh(
    strategy: SearchStrategy[Any], *, examples: int, under: settings = _UNHURRIED
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """A decorator that calls a test with so many cases, in runs of a few, as a long run mostly varies what it has drawn.

    Of 100 scenarios of a layout in one run about 80 are distinct, with fewer pairs of features than 40 in four runs have.
    """

    def decorate(test: Callable[[Any], None]) -> Callable[[], None]:
        def run() -> None:
            for number, start in enumerate(range(0, examples, FRESH)):
                one = settings(under, max_examples=min(FRESH, examples - start))(given(strategy)(test))
                (seed(number)(one) if under.derandomize else one)()

        run.__doc__ = test.__doc__
        return run

    return decorate
