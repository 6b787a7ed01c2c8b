"""Validation of a finding's files beyond their field types."""

from __future__ import annotations

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
    if not verdict.outcome.is_finding or verdict.known:
        raise InvalidScenario(f"{where}: outcome: {verdict.outcome.value} is no finding; allowed: diverged, crashed, hung")
    if verdict.world not in COMPARABLE:
        raise InvalidScenario(f"{where}: world: {shown(verdict.world)} is unknown; allowed: {', '.join(COMPARABLE)}")
    if len(verdict.reason) > _MAX_REASON:
        raise InvalidScenario(f"{where}: reason: {len(verdict.reason):,} characters; allowed: at most {_MAX_REASON:,}")
    for follower in verdict.followers:
        if len(follower.split(" ", 3)) != 4:
            raise InvalidScenario(f"{where}: followers: {shown(follower)} is none; allowed: 'step 0 gradient NAME' and the like")
    steps = num_steps(verdict.case)
    if verdict.divergence is not None and verdict.divergence.step not in range(steps):
        raise InvalidScenario(f"{where}: divergence.step: {shown(verdict.divergence.step)} is none; allowed: 0 to {steps - 1}")


def require_sound_environment(environment: Environment, where: str) -> None:
    """Raise `InvalidScenario` for versions that cannot be printed or compared."""
    for field in fields(Environment):
        value = getattr(environment, field.name)
        if not (value.isprintable() and len(value) <= _MAX_VERSION):
            allowed = f"at most {_MAX_VERSION} printable characters"
            raise InvalidScenario(f"{where}: {field.name}: {shown(value)}; allowed: {allowed}")
    _require_version(environment.torch, f"{where}: torch")


def require_sound_versions(shown_in: ShownIn, where: str) -> None:
    """Raise `InvalidScenario` for an empty or invalid bisection result."""
    if not shown_in.versions or not shown_in.measured:
        raise InvalidScenario(f"{where}: no version was measured; allowed: at least one")
    for version in (*shown_in.versions, *(found.torch for found in shown_in.measured)):
        _require_version(version, where)


def _require_version(text: str, where: str) -> None:
    try:
        Version(text)
    except InvalidVersion:
        raise InvalidScenario(f"{where}: {shown(text)} is no version; allowed: one such as 2.13.0") from None
