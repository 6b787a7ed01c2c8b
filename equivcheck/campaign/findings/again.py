"""Compares a finding with a later check of its case."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.system.choice import Choice


class Again(Choice):
    """A later check's answer about a finding."""

    SHOWS = "shows"
    KNOWN = "known"
    DIFFERENTLY = "differently"
    DOES_NOT = "does_not"
    UNTOLD = "untold"


def again(kept: CaseVerdict, verdict: CaseVerdict) -> Again:
    """Compare a later verdict with the kept one. `UNTOLD` if the verdict is unsupported, or undecided at some step."""
    if verdict.is_clear:
        return Again.DOES_NOT
    if not (verdict.outcome.is_finding or verdict.outcome is Outcome.KNOWN):
        return Again.UNTOLD
    is_known = verdict.outcome is Outcome.KNOWN
    as_found = replace(verdict, outcome=kept.outcome) if is_known else verdict
    if fingerprint(as_found) != fingerprint(kept):
        return Again.DIFFERENTLY
    return Again.KNOWN if is_known else Again.SHOWS


def why_untold(verdict: CaseVerdict) -> str:
    """Outcome and reason in one line: ``unsupported: torch 2.9 has no ...``."""
    return ": ".join(filter(None, (verdict.outcome.value, verdict.reason or verdict.undecided)))


def shows_again(kept: CaseVerdict, verdict: CaseVerdict) -> Showing:
    """Answer as for a torch version. A case that fails there in another way counts as `CANNOT_RUN`."""
    found = again(kept, verdict)
    if found is Again.DOES_NOT:
        return Showing(shows=Shows.DOES_NOT)
    if found in (Again.SHOWS, Again.KNOWN):
        return Showing(shows=Shows.SHOWS, reason=f"the known issue {verdict.known}" if verdict.known else "")
    another = "fails in another way, " if found is Again.DIFFERENTLY else ""
    return Showing(shows=Shows.CANNOT_RUN, reason=f"{another}{why_untold(verdict)}")
