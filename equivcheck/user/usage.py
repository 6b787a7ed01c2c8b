"""The form of errors about invalid arguments."""

from __future__ import annotations

from equivcheck.errors import UsageError

API = "check_training"
"""Function whose arguments are checked, and layout name in the counts of checked scenarios."""


def invalid(argument: str, why: str, expected: str, *, api: str = API) -> UsageError:
    """Return an error: `argument` is its name, with its value if that helps; `expected` describes valid values."""
    return UsageError(f"{api}: {argument} is not valid: {why}. Expected {expected}.")
