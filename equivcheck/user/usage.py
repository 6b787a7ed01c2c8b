"""Builds errors about invalid arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from equivcheck.errors import UsageError
from equivcheck.system.printable import shorten

API = "check_training"
"""Function whose arguments are checked. Counts of checked scenarios use it as the layout name."""


def invalid(argument: str, why: str, expected: str, *, hint: str = "", api: str = API) -> UsageError:
    """Return a `UsageError` about an invalid argument.

    `argument` is the argument's name, with its value if that helps. `expected` describes valid values. `hint` is a result of
    `did_you_mean`.
    """
    return UsageError(f"{api}: {argument} is not valid: {why}. {hint}Expected {expected}.")


@contextlib.contextmanager
def named_in_errors(api: str) -> Iterator[None]:
    """Inside the context, errors name the function `api` instead of ``check_training``, because the user called `api`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace(f"{API}: ", f"{api}: ", 1)) from error


def require_call(name: str, function: Any, arguments: tuple[str, ...], *, is_optional: bool) -> None:
    """Raise `UsageError` if `function` cannot be called with these positional arguments, or has them in another order.

    `name` is its name in `check_training`.
    """
    why = "" if callable(function) else "it is not callable"
    if not why:
        try:
            # A decorator with `functools.wraps` may add arguments, so the signature of the decorated function does not matter.
            signature = inspect.signature(function, follow_wrapped=False)
            signature.bind(*arguments)
            # Targets may be called outputs, and losses such as the mean squared error are right in both orders.
            why = "" if name == "loss" else _other_order(tuple(signature.parameters), arguments)
        except ValueError:  # some builtins have no signature
            return
        except TypeError as error:
            why = str(error)
    if why:
        expected = f"a function {name}({', '.join(arguments)})"
        given = " ".join(shorten(repr(function), 100).split())
        raise invalid(f"{name} {given}", why, f"{expected}, or None" if is_optional else expected)


def _other_order(parameters: tuple[str, ...], arguments: tuple[str, ...]) -> str:
    """Return which parameter has the name of an argument that is passed at another position; empty if there is none."""
    for parameter, argument in zip(parameters, arguments, strict=False):
        if parameter != argument and parameter in arguments:
            return f"its parameter `{parameter}` would get the {argument}"
    return ""
