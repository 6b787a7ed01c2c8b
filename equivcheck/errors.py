"""Errors raised on purpose. Any other exception from equivcheck is a bug."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class EquivCheckError(Exception):
    """Base class for errors that equivcheck raises on purpose."""


class InvalidScenario(EquivCheckError, ValueError):
    """Error about an invalid value in a scenario class, or about JSON that does not describe a scenario."""


class UsageError(EquivCheckError, ValueError):
    """Error about a request for something unknown or impossible. The message lists the valid choices."""


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UsageError:
    """Return the error for a name that does not exist. It suggests similar names first, then lists all.

    `kind` is the noun before the name in the message, such as ``layout``.
    """
    allowed = tuple(names)
    hint = did_you_mean(name, allowed)
    return UsageError(f"{kind} {name!r} is not valid: it does not exist. {hint}Expected one of {', '.join(allowed)}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with similar names, such as ``Did you mean fsdp? ``. Empty if no name is similar."""
    from difflib import get_close_matches

    allowed = tuple(names)
    similar = " or ".join(get_close_matches(name, allowed) or get_close_matches(name.lower(), allowed))
    return f"Did you mean {similar}? " if similar else ""


class NotEquivalent(EquivCheckError, AssertionError):
    """Raised if the parallel training differs from the single-device run, or if the comparison could not be completed."""

    def __init__(self, text: str = "", tell: Callable[[], str] | None = None) -> None:
        """`tell` computes a longer text when the error is first printed. If `tell` fails, `text` is kept with a note."""
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
