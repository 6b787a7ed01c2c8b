"""Errors about batches that cannot be taken apart."""

from __future__ import annotations

from equivcheck.errors import UsageError


def invalid(argument: str, why: str, expected: str) -> UsageError:
    """Return the error for an invalid argument. `why` is the reason, `expected` a phrase for valid values.

    The message starts with ``check_training``. `check_batching` replaces this name by its own.
    """
    return UsageError(f"check_training: {argument} is not valid: {why}. Expected {expected}.")
