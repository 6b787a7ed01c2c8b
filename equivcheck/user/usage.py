"""The form of errors about invalid arguments."""

from __future__ import annotations

from equivcheck.errors import UsageError

API = "check_training"
"""Function whose arguments are checked. Counts of checked scenarios use it as the layout name."""


def invalid(argument: str, why: str, expected: str, *, api: str = API) -> UsageError:
    """Error about an invalid argument.

    `argument` is its name, with its value if that helps. `expected` describes valid values.
    """
    return UsageError(f"{api}: {argument} is not valid: {why}. Expected {expected}.")
