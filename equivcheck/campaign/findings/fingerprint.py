"""Fingerprints for failing verdicts. Verdicts with the same fault have equal fingerprints."""

from __future__ import annotations

import hashlib
import re

from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.failure import Failure, FailureKind, RankState

_LENGTH = 12
"""Hex digits. With 48 bits, a thousand findings collide in one store out of half a billion."""

_BLURRED = (
    (re.compile(r"\s*Sharding propagation failed for .*?(?=, caused by |$)", re.DOTALL), ""),
    (re.compile(r"0x[0-9a-fA-F]+"), "ADDRESS"),
    (re.compile(r"(?:/[\w.+-]+){2,}"), "PATH"),
    (re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"), "N"),
    (re.compile(r"N(?:, ?N)+,?"), "N"),
    (re.compile(r"\s+"), " "),
)
"""Parts that differ between two messages about one fault: placements, addresses, paths, numbers, list lengths, line breaks."""


def fingerprint(verdict: CaseVerdict) -> str:
    """Return 12 hex digits, equal for verdicts with the same kind of failure in the same layout.

    The digits do not depend on the world, the scenario's sizes or the step.
    """
    parts = (verdict.outcome.value, verdict.case.name, *what_is_wrong(verdict), *(["beyond"] if verdict.beyond else []))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_LENGTH]


def what_is_wrong(verdict: CaseVerdict) -> tuple[str, ...]:
    """Describe the kind of failure: a divergence's phase, difference and tensor, a crash's error, or a hang's collective calls.

    The description does not name the layout.
    """
    if verdict.divergence is not None:
        first = verdict.divergence
        return first.phase.value, first.difference.value, kind_of_tensor(first.tensor)
    if verdict.failure is None:
        return (blur(verdict.reason),)
    if verdict.failure.hung:
        return _of_hang(verdict.failure)
    culprit = verdict.failure.culprit
    return (blur(culprit.error if culprit is not None and culprit.error else verdict.failure.summary),)


def _of_hang(failure: Failure) -> tuple[str, ...]:
    """Return the fingerprint's text for a hang.

    A simulated deadlock is a timeout in other worlds, so both get one fingerprint. If a rank was still computing, the calls of
    the waiting ranks only say how far they had come.
    """
    if any(report.state is RankState.RUNNING for report in failure.reports):
        return ("endless",)
    kind = "mismatch" if failure.kind is FailureKind.MISMATCH else "hang"
    pending = {report.pending.split(" ", 1)[0] for report in failure.reports if report.pending}
    return kind, *sorted(pending)


def kind_of_tensor(name: str) -> str:
    """Return a tensor's name without indices; for optimizer state, only the key."""
    return blur(name.rsplit("/", 1)[-1])


def blur(text: str) -> str:
    """Remove the parts of a message that change from run to run, such as addresses and numbers."""
    for pattern, replacement in _BLURRED:
        text = pattern.sub(replacement, text)
    return text.strip()
