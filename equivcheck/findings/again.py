"""Whether a finding shows in a later check of its scenario."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.findings.fingerprint import fingerprint
from equivcheck.known_issues.showing import Showing, Shows
from equivcheck.verdict.verdict import Outcome, Verdict


def shows_again(kept: Verdict, verdict: Verdict) -> Showing:
    """Whether a verdict is of the same fault; one that fails in another way, or proves nothing at some step, does not tell."""
    if verdict.is_clear:
        return Showing(shows=Shows.DOES_NOT)
    if verdict.outcome is Outcome.KNOWN and _is_same(kept, replace(verdict, outcome=kept.outcome)):
        return Showing(shows=Shows.SHOWS, reason=f"as the known issue {verdict.known}")
    if verdict.outcome.is_finding and _is_same(kept, verdict):
        return Showing(shows=Shows.SHOWS)
    what = f"fails in another way, {verdict.outcome.value}" if _fails(verdict) else verdict.outcome.value
    return Showing(shows=Shows.CANNOT_RUN, reason=": ".join(filter(None, (what, verdict.reason or verdict.undecided))))


def _is_same(kept: Verdict, verdict: Verdict) -> bool:
    return fingerprint(verdict) == fingerprint(kept)


def _fails(verdict: Verdict) -> bool:
    return verdict.outcome.is_finding or verdict.outcome is Outcome.KNOWN
