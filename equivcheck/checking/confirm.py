"""Checks a finding again in gloo: separate processes without our scheduler, with torch's own process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome

V = TypeVar("V", bound=CaseVerdict)

CONFIRMING = "gloo"
"""World in which findings from other worlds are checked again."""
CONFIRMING_SECONDS = 15.0
"""Seconds after which ranks in the confirming world count as hung. A run that hangs takes that long."""


def may_be_confirmed(verdict: CaseVerdict) -> bool:
    """Whether a check in gloo could confirm the verdict: it is a finding from another world, and not confirmed so far."""
    return verdict.outcome.is_finding and verdict.world != CONFIRMING and not verdict.confirmed


def add_confirmation(verdict: V, again: CaseVerdict) -> V:
    """Add the result of a second check in another world to a finding's verdict. `again` is the second verdict."""
    return replace(verdict, confirmed=_comparison(verdict.outcome, again))


def confirmed_by(verdict: V, check: Callable[[], CaseVerdict]) -> V:
    """Call `check`, which repeats a finding's check in another world, and add the result to the finding's verdict.

    If `check` raises, the first verdict is returned, with the error in `unfinished`.
    """
    try:
        return add_confirmation(verdict, check())
    except Exception as error:
        return verdict.with_unfinished(f"confirming on {CONFIRMING}", error)


def _comparison(outcome: Outcome, again: CaseVerdict) -> str:
    if again.outcome is outcome:
        return f"{outcome.value} on {again.world} too"
    if again.outcome.is_finding:
        return f"{again.outcome.value} on {again.world} instead: {again.reason}"
    return f"not seen on {again.world}: {again.outcome.value} there"
