"""What the program of each known difference came to on versions of torch, as measured over gloo."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

SHOWING = ("wrong", "raises", "hangs")
"""What counts as showing it; else it was right, or refused."""


@cache
def measured() -> dict[str, dict[str, str]]:
    """By identifier, then by version, oldest first."""
    return tomllib.loads(files("equivcheck.program_run").joinpath("shows.toml").read_text("utf-8"))


def seen_on(identifier: str) -> tuple[str, ...]:
    """The versions that show it."""
    return tuple(version for version, found in measured()[identifier].items() if found in SHOWING)


def unseen_on(identifier: str) -> tuple[str, ...]:
    """The versions that were tried and do not."""
    return tuple(version for version, found in measured()[identifier].items() if found not in SHOWING)
