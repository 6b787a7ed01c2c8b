"""Validation of a finding's files beyond their field types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from packaging.version import InvalidVersion, Version

from equivcheck.campaign.findings.environment import Environment
from equivcheck.campaign.findings.versions import ShownIn
from equivcheck.checking.kinds import num_steps
from equivcheck.errors import InvalidScenario
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.noun import shown
from equivcheck.worlds.pool import COMPARABLE

_MAX_REASON = 100_000
"""Most characters in a reason. Torch errors with stacks from several ranks have some thousand."""
_MAX_VERSION = 200
"""Most characters in an environment field."""


def require_sound_verdict(verdict: CaseVerdict, where: str) -> None:
    """Raise `InvalidScenario` for a verdict that cannot belong to a finding."""
    for wrong in _mistakes(verdict):
        raise InvalidScenario(f"{where}: {wrong}")


def _mistakes(verdict: CaseVerdict) -> Iterator[str]:
    if not verdict.outcome.is_finding or verdict.known:
        yield f"outcome {verdict.outcome.value} is not valid: no finding. Expected diverged, crashed or hung"
    if verdict.world not in COMPARABLE:
        yield f"world {shown(verdict.world)} is not valid: unknown. Expected one of {', '.join(COMPARABLE)}"
    if len(verdict.reason) > _MAX_REASON:
        yield f"reason is not valid: {len(verdict.reason):,} characters. Expected at most {_MAX_REASON:,}"
    for follower in verdict.followers:
        if len(follower.split(" ", 3)) != 4:
            yield f"followers {shown(follower)} is not valid. Expected a text such as 'step 0 gradient NAME'"
    steps, divergence = num_steps(verdict.case), verdict.divergence
    if divergence is not None and divergence.step not in range(steps):
        yield f"divergence.step {shown(divergence.step)} is not valid: no such step. Expected 0 to {steps - 1}"


def require_sound_environment(environment: Environment, where: str) -> None:
    """Raise `InvalidScenario` for versions that cannot be printed or compared."""
    for field in fields(Environment):
        value = getattr(environment, field.name)
        if not (value.isprintable() and len(value) <= _MAX_VERSION):
            expected = f"at most {_MAX_VERSION} printable characters"
            raise InvalidScenario(f"{where}: {field.name} {shown(value)} is not valid. Expected {expected}")
    _require_version(environment.torch, f"{where}: torch")


def require_sound_versions(shown_in: ShownIn, where: str) -> None:
    """Raise `InvalidScenario` for an empty or invalid bisection result."""
    if not shown_in.versions or not shown_in.measured:
        raise InvalidScenario(f"{where}: versions are not valid: none was measured. Expected at least one")
    for version in (*shown_in.versions, *(found.torch for found in shown_in.measured)):
        _require_version(version, where)


def _require_version(text: str, where: str) -> None:
    try:
        Version(text)
    except InvalidVersion:
        raise InvalidScenario(f"{where} {shown(text)} is not valid: no version number. Expected one such as 2.13.0") from None
