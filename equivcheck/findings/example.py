"""Which of two verdicts with one fingerprint is the better example to keep."""

from __future__ import annotations

from equivcheck.findings.size import Size, size_of
from equivcheck.verdict.verdict import CaseVerdict

_EXAMINED = ("diagnosis", "confirmed", "drift")
"""What a verdict has once its case was shrunk."""


def is_better(verdict: CaseVerdict, before: CaseVerdict) -> bool:
    """Whether its case is smaller; but what was shrunk and explained gives way only to what was shrunk and explained as well."""
    return _order(verdict) < _order(before)


def says_more(verdict: CaseVerdict, before: CaseVerdict) -> bool:
    """Whether a verdict on the same case says more: why it failed, or whether another world finds the same."""
    adds = any(getattr(verdict, name) and not getattr(before, name) for name in (*_EXAMINED, "unfinished"))
    return adds and before.case == verdict.case


def is_examined(verdict: CaseVerdict) -> bool:
    """Whether its case was shrunk, and explained or confirmed."""
    return any(getattr(verdict, name) for name in _EXAMINED)


def _order(verdict: CaseVerdict) -> tuple[bool, Size]:
    return not is_examined(verdict), size_of(verdict.case)
