"""Expert parallelism, which scripts do not have yet."""

from __future__ import annotations

from equivcheck.layouts.script.draft import Draft, refuse
from equivcheck.scenario import Parallelism


def write(draft: Draft, parallelism: Parallelism) -> None:  # noqa: ARG001 - of all that write
    """Raises `CannotExport`."""
    raise refuse("ExpertParallel", "the exchange of rows fills no short script")
