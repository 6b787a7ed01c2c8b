"""What makes two failing verdicts the same finding."""

from __future__ import annotations

import hashlib
import re

from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.failure import Failure, FailureKind, RankState
from equivcheck.worlds.trace.differences import Divergence

_LENGTH = 12
"""Hex digits: 48 bits, so that two of a thousand findings collide once in half a billion stores."""

_BLURRED = (
    (re.compile(r"\s*Sharding propagation failed for .*?(?=, caused by |$)", re.DOTALL), ""),
    (re.compile(r"0x[0-9a-fA-F]+"), "ADDRESS"),
    (re.compile(r"(?:/[\w.+-]+){2,}"), "PATH"),
    (re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"), "N"),
    (re.compile(r"N(?:, ?N)+,?"), "N"),
    (re.compile(r"\s+"), " "),
)
"""What differs between two messages about the same thing: where DTensors lie, addresses, paths, numbers, how many numbers are
listed, line breaks."""


def fingerprint(verdict: CaseVerdict) -> str:
    """A short hash of what is wrong: the same for the same fault in any world, at any size and step; 12 hex digits."""
    parts = (verdict.outcome.value, verdict.case.name, *what_is_wrong(verdict), *(["beyond"] if verdict.beyond else []))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_LENGTH]


def what_is_wrong(verdict: CaseVerdict) -> tuple[str, ...]:
    """The fault without the layout: phase, difference and kind of tensor; the error of a crash; the calls of a hang."""
    if verdict.divergence is not None:
        return _of_divergence(verdict.divergence)
    if verdict.failure is None:
        return (blur(verdict.reason),)
    return _of_hang(verdict.failure) if verdict.failure.hung else _of_crash(verdict.failure)


def _of_divergence(divergence: Divergence) -> tuple[str, ...]:
    return divergence.phase.value, divergence.difference.value, kind_of_tensor(divergence.tensor)


def _of_crash(failure: Failure) -> tuple[str, ...]:
    culprit = failure.culprit
    return (blur(culprit.error if culprit is not None and culprit.error else failure.summary),)


def _of_hang(failure: Failure) -> tuple[str, ...]:
    """A deadlock that a simulation sees is a timeout elsewhere, so the two are not told apart.

    Where a rank was still at work, what the others waited in says how far they had come, not what is wrong.
    """
    if any(report.state is RankState.RUNNING for report in failure.reports):
        return ("endless",)
    kind = "mismatch" if failure.kind is FailureKind.MISMATCH else "hang"
    pending = {report.pending.split(" ", 1)[0] for report in failure.reports if report.pending}
    return kind, *sorted(pending)


def kind_of_tensor(name: str) -> str:
    """A tensor's name without the indices in it; of optimizer state the key alone."""
    return blur(name.rsplit("/", 1)[-1])


def blur(text: str) -> str:
    """A message without what differs from one occurrence to the next."""
    for pattern, replacement in _BLURRED:
        text = pattern.sub(replacement, text)
    return text.strip()
