"""Whether another world finds what one has found: processes have no scheduler of ours, no shared memory and torch's own group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome

V = TypeVar("V", bound=CaseVerdict)

CONFIRMING = "gloo"
"""The world that what others found is run in once more."""
CONFIRMING_SECONDS = 15.0
"""Limit for its ranks: a hang takes all of it."""


def may_be_confirmed(verdict: CaseVerdict) -> bool:
    """Whether it says anything that another world could confirm."""
    return verdict.outcome.is_finding and verdict.world != CONFIRMING and not verdict.confirmed


def confirmed(verdict: V, again: CaseVerdict) -> V:
    """The verdict with what came of the same case, and the same fault if one was planted, in another world."""
    return replace(verdict, confirmed=_in_words(verdict.outcome, again))


def confirmed_by(verdict: V, check: Callable[[], CaseVerdict]) -> V:
    """The same, with a check of the case in that world; one that cannot run costs no more than its text."""
    try:
        return confirmed(verdict, check())
    except Exception as error:
        return verdict.without(f"confirming on {CONFIRMING}", error)


def _in_words(outcome: Outcome, again: CaseVerdict) -> str:
    if again.outcome is outcome:
        return f"{outcome.value} on {again.world} too"
    if again.outcome.is_finding:
        return f"otherwise on {again.world}, where it {again.outcome.value}: {again.reason}"
    return f"not seen on {again.world}: {again.outcome.value} there"
