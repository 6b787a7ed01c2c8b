"""What the program of each known difference came to on versions of torch, as measured over gloo."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from equivcheck.program_run.known import KnownDifference


@cache
def measured() -> dict[str, dict[str, str]]:
    """By identifier, then by version, oldest first: wrong, raises, raises otherwise, hangs, right, or refused."""
    return tomllib.loads(files("equivcheck.program_run").joinpath("shows.toml").read_text("utf-8"))


def seen_on(known: KnownDifference) -> tuple[str, ...]:
    """The versions that show it."""
    return tuple(version for version, found in measured()[known.id].items() if found in _showing(known))


def unseen_on(known: KnownDifference) -> tuple[str, ...]:
    """The versions that were tried and do not: they are right, refuse it, or fail in another way."""
    return tuple(version for version, found in measured()[known.id].items() if found not in _showing(known))


def _showing(known: KnownDifference) -> tuple[str, ...]:
    return ("raises", "hangs") if known.raises else ("wrong",)
