"""Whether a finding shows in a later check of its scenario."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.system.choice import Choice


class Again(Choice):
    """What a later check of a finding's case says about its fault."""

    SHOWS = "shows"
    KNOWN = "known"
    DIFFERENTLY = "differently"
    DOES_NOT = "does_not"
    UNTOLD = "untold"


def again(kept: CaseVerdict, verdict: CaseVerdict) -> Again:
    """Whether a verdict is of the same fault as a kept one; what is unsupported, or in doubt at some step, does not tell."""
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
    """The outcome of a check and its reason, in a line: ``unsupported: torch 2.9 has no ...``."""
    return ": ".join(filter(None, (verdict.outcome.value, verdict.reason or verdict.undecided)))


def shows_again(kept: CaseVerdict, verdict: CaseVerdict) -> Showing:
    """The same as the answer of a version of torch; a scenario that fails there in another way cannot tell."""
    found = again(kept, verdict)
    if found is Again.DOES_NOT:
        return Showing(shows=Shows.DOES_NOT)
    if found in (Again.SHOWS, Again.KNOWN):
        return Showing(shows=Shows.SHOWS, reason=f"the known issue {verdict.known}" if verdict.known else "")
    another = "fails in another way, " if found is Again.DIFFERENTLY else ""
    return Showing(shows=Shows.CANNOT_RUN, reason=f"{another}{why_untold(verdict)}")
