"""Facts about one campaign: time, machine, commits, mode and end."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from equivcheck.campaign.findings.environment import environment
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.commands import run

_GIT_SECONDS = 10.0
_REVISIONS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT")
"""Variables with the commit in GitHub, GitLab and Jenkins."""
_TORCH_COMMIT = re.compile(r"^git_version\s*(?::.*?)?=\s*['\"](\w+)['\"]", re.MULTILINE)


def torch_commit() -> str:
    """Return the commit from which the installed torch was built, without importing torch; empty if unknown."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        found = _TORCH_COMMIT.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def revision() -> str:
    """Return the commit of the working directory, from the CI service or git; empty if unknown."""
    for name in _REVISIONS:
        if value := os.environ.get(name, ""):
            return value
    git = shutil.which("git")
    if git is None:
        return ""
    ran = run([git, "rev-parse", "HEAD"], seconds=_GIT_SECONDS, environment=os.environ)
    return ran.printed.strip() if ran.code == 0 else ""


class Mode(PrintableEnum):
    """Purpose of a campaign. It decides which findings make the campaign fail."""

    PLAIN = "plain"
    """A full check: each finding makes the campaign fail."""
    EXPLORE = "explore"
    """A first look: findings do not make the campaign fail."""
    PR = "pr"
    """Before a merge: findings unknown to the store make the campaign fail."""
    NIGHTLY = "nightly"
    """Regular runs: findings that are new or back again make the campaign fail."""

    @property
    def replays(self) -> bool:
        """Whether the campaign first checks stored findings again."""
        return self in (Mode.PR, Mode.NIGHTLY)


class FailOn(PrintableEnum):
    """Kinds of findings that make a campaign fail."""

    ALL = "all"
    """Findings in trainings and tensor programs."""
    TRAININGS = "trainings"
    """Only findings in trainings."""


class Ended(PrintableEnum):
    """How a campaign ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Facts about a campaign, known at its start."""

    seed: int | None
    """Seed for generated cases; None if the history knows only a finding of this campaign."""
    mode: Mode = Mode.PLAIN
    """Purpose of the campaign."""
    fail_on: FailOn = FailOn.ALL
    """Kinds of findings that can make this campaign fail."""
    shard: str = ""
    """Part of a divided campaign, such as ``2/8``; empty if the campaign is not divided."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id, so that histories from several machines can be merged."""
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    """Start time in UTC."""
    torch: str = field(default_factory=lambda: environment().torch)
    """Torch version."""
    torch_commit: str = field(default_factory=torch_commit)
    """Commit from which torch was built, because nightly builds may have equal versions; empty if unknown."""
    equivcheck: str = field(default_factory=lambda: environment().equivcheck)
    """Installed equivcheck version."""
    revision: str = field(default_factory=revision)
    """The user repository's commit; empty if unknown."""
    platform: str = field(default_factory=lambda: environment().platform)
    """Operating system and processor."""
