"""Decides which of two verdicts with the same fault has the better example."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from equivcheck.campaign.findings.size import Size, size_of
from equivcheck.oracle.verdict.verdict import CaseVerdict

V = TypeVar("V", bound=CaseVerdict)

_EXAMINED = ("diagnosis", "confirmed", "drift")
"""Fields added to a verdict after shrinking."""
NOT_SHRUNK = "not fully shrunk: the campaign ended first"
"""Mark in `unfinished` until the case has been shrunk."""


def is_better_example(verdict: CaseVerdict, before: CaseVerdict) -> bool:
    """Whether `verdict` is a better example of the fault than `before`.

    A verdict with a diagnosis or a confirmation is better than one without. Next, a fully shrunk case is better, then a smaller
    case.
    """
    return _order(verdict) < _order(before)


def adds_information(verdict: CaseVerdict, before: CaseVerdict) -> bool:
    """Whether `verdict` is about the same case as `before`, and adds a diagnosis or a confirmation in another world."""
    adds = any(getattr(verdict, name) and not getattr(before, name) for name in (*_EXAMINED, "unfinished"))
    return adds and before.case == verdict.case and (is_shrunk(verdict) or not is_shrunk(before))


def is_examined(verdict: CaseVerdict) -> bool:
    """Whether the verdict has a diagnosis, or a confirmation in another world."""
    return any(getattr(verdict, name) for name in _EXAMINED)


def is_shrunk(verdict: CaseVerdict) -> bool:
    """Whether the search for a smaller case was completed, and not cut short by the campaign's end."""
    return NOT_SHRUNK not in verdict.unfinished


def mark_not_shrunk(verdict: V) -> V:
    """Return the verdict with the note ``not fully shrunk``."""
    return replace(verdict, unfinished="; ".join(filter(None, (verdict.unfinished, NOT_SHRUNK))))


def unmark_not_shrunk(verdict: V) -> V:
    """Return the verdict without the note ``not fully shrunk``."""
    kept = (part for part in verdict.unfinished.split("; ") if part != NOT_SHRUNK)
    return replace(verdict, unfinished="; ".join(kept))


def _order(verdict: CaseVerdict) -> tuple[bool, bool, Size]:
    return not is_examined(verdict), not is_shrunk(verdict), size_of(verdict.case)
