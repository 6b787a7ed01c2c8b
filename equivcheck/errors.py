"""The errors that this package raises on purpose; everything else that escapes is a bug in it."""

from __future__ import annotations

from collections.abc import Callable


class EquivCheckError(Exception):
    """Root of every error raised on purpose by this package."""


class InvalidScenario(EquivCheckError, ValueError):
    """A noun was built with a value outside its range, or a serialised scenario does not describe one."""


class UsageError(EquivCheckError, ValueError):
    """A caller asked for something that does not exist; the text lists what does."""


class NotEquivalent(EquivCheckError, AssertionError):
    """A parallel training did not compute what one device computes (or that could not be established)."""

    def __init__(self, text: str = "", tell: Callable[[], str] | None = None) -> None:
        """`tell` gives a better text at the first time that one is asked for; where it fails, `text` stands, and says so."""
        super().__init__(text)
        self._tell = tell

    def __str__(self) -> str:
        tell, self._tell = self._tell, None
        if tell is not None:
            self.args = (_told(str(self.args[0]), tell),)
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[NotEquivalent], tuple[str]]:
        return type(self), (str(self),)


def _told(text: str, tell: Callable[[], str]) -> str:
    try:
        return tell()
    except Exception as error:
        return f"{text}\n(no diagnosis: {type(error).__name__}: {error})"
