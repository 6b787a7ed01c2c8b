"""What is said when a scenario cannot be written as a script of torch alone."""

from __future__ import annotations

from equivcheck.errors import UsageError


class CannotExport(UsageError):
    """A scenario, or a mutant, has something that no script expresses; the text names it."""


def refuse(what: str, why: str) -> CannotExport:
    """The error for an option, by its name in the scenario, and the reason."""
    return CannotExport(f"{what} cannot be exported: {why}")
