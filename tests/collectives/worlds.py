"""Running generated calls in each world that has data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from equivcheck.worlds.pool import ranks

WORLDS = ("sim", "gloo")
DEADLINE = 10.0
"""Seconds; a batch takes milliseconds."""


def run_in(world: str, size: int, program: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What a program returns on each rank of a kept world; what torch deprecates is no news here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ranks(world, size).run(program, *arguments, deadline=DEADLINE).values
