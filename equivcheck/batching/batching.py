"""`Batching`: the arguments for one call to `check_batching`, as a value."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from equivcheck.batching.check import check_batching
from equivcheck.batching.usage import invalid
from equivcheck.errors import did_you_mean

if TYPE_CHECKING:
    from equivcheck.batching.verdict import BatchingVerdict

_PARAMETERS = inspect.signature(check_batching).parameters


class Batching:
    """Holds the arguments for one call of `check_batching`.

    A recipe is a Python file with a `Batching`. The command ``equivcheck batching RECIPE`` checks it.

    Raises `UsageError` if an argument is unknown or missing.
    """

    def __init__(self, **arguments: Any) -> None:
        unknown = next((name for name in arguments if name not in _PARAMETERS), None)
        if unknown is not None:
            hint = did_you_mean(unknown, tuple(_PARAMETERS))
            raise invalid(f"argument {unknown!r}", "it does not exist", f"one of {', '.join(_PARAMETERS)}", hint=hint)
        missing = next((name for name, each in _PARAMETERS.items() if each.default is each.empty and name not in arguments), None)
        if missing is not None:
            raise invalid(f"argument {missing!r}", "it is missing", "model, step and batch")
        self.arguments = arguments
        """The arguments, by name."""

    def check(self) -> BatchingVerdict:
        """Call `check_batching` with these arguments."""
        return check_batching(**self.arguments)
