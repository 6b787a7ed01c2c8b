"""The errors that this package raises on purpose; everything else that escapes is a bug in it."""

from __future__ import annotations


class EquivCheckError(Exception):
    """Root of every error raised on purpose by this package."""


class InvalidScenario(EquivCheckError, ValueError):
    """A noun was built with a value outside its range, or a serialised scenario does not describe one."""


class UsageError(EquivCheckError, ValueError):
    """A caller asked for something that does not exist; the text lists what does."""


class NotEquivalent(EquivCheckError, AssertionError):
    """A parallel training did not compute what one device computes (or that could not be established)."""
