"""Context parallelism in a script: not yet."""

from __future__ import annotations

from equivcheck.layouts.script.draft import Draft, refuse
from equivcheck.scenario import Parallelism


def write(draft: Draft, parallelism: Parallelism) -> None:  # noqa: ARG001 - of the base class
    """Refuse."""
    raise refuse("ContextParallel", "the modules whose positions look at those of other ranks fill no short script")
