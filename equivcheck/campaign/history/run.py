"""One run of a campaign: when, where, and how it came to an end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime

from equivcheck.campaign.findings.environment import environment
from equivcheck.campaign.history.commits import revision, torch_commit
from equivcheck.system.choice import Choice


class Mode(Choice):
    """What a campaign is for, which decides what makes it fail."""

    PLAIN = "plain"
    """A check of everything: it fails on every finding."""
    EXPLORE = "explore"
    """A first look: findings are its result, and make it fail never."""
    PR = "pr"
    """Before a change is merged: it fails on findings that the store does not know."""
    NIGHTLY = "nightly"
    """Regularly: it fails on findings that are new or back again."""

    @property
    def replays(self) -> bool:
        """Whether what the store has is checked again first."""
        return self in (Mode.PR, Mode.NIGHTLY)


class FailOn(Choice):
    """Which findings can make a campaign fail."""

    ALL = "all"
    """Findings in trainings and in tensor programs."""
    TRAININGS = "trainings"
    """Only findings in trainings."""


class Ended(Choice):
    """How a run came to its end."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of a run when it begins."""

    seed: int | None
    """Of its generated scenarios; None where all that is known of a run is what it found."""
    mode: Mode = Mode.PLAIN
    """What it is for."""
    fail_on: FailOn = FailOn.ALL
    """Which findings can make it fail."""
    shard: str = ""
    """Which part of a campaign it is, as ``2/8``; empty for the whole."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random, so that histories of several machines can be merged."""
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    """When, in UTC."""
    torch: str = field(default_factory=lambda: environment().torch)
    """Version of torch."""
    torch_commit: str = field(default_factory=torch_commit)
    """Commit that torch was built from, which tells nightly builds apart; empty where it does not say."""
    equivcheck: str = field(default_factory=lambda: environment().equivcheck)
    """Version of this package."""
    revision: str = field(default_factory=revision)
    """Commit of the repository in which it runs; empty where there is none."""
    platform: str = field(default_factory=lambda: environment().platform)
    """Operating system and processor."""
