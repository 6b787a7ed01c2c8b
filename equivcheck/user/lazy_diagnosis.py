"""A user training's diagnosis, which runs when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivcheck.oracle.verdict.cause import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class UserDiagnosis:
    """Result of a diagnosis: the cause, the first wrong module, and the type checker's opinion."""

    cause: str = ""
    """The mistake that reproduces the values on all ranks, or without which ranks are right, in a sentence. May be empty."""
    kinds: tuple[Cause, ...] = ()
    """Codes for the cause; several if several mistakes fit."""
    where: str = ""
    """First module with a wrong output or output gradient; empty if none is known."""
    types: str = ""
    """Result of the spmd_types type checker; empty if it did not run."""
    hint: str = ""
    """Possible explanation that is not proven. Empty if there is a cause."""
    unexplained: str = ""
    """Why no cause is known, for example how many mistakes were tried. Empty if there is a cause, or if no search took place."""
    unfinished: str = ""
    """Failed part of the diagnosis, with its error; empty if none failed."""


class LazyDiagnosis:
    """Diagnosis of one verdict, which runs when it is first read, and only once.

    If it is interrupted, the next read starts it again. Pickling runs the diagnosis first, because a pickle contains the result
    but not the training.
    """

    def __init__(self, diagnose: Callable[[], UserDiagnosis] | None = None, result: UserDiagnosis | None = None) -> None:
        """`diagnose` computes the result; without it, the result is `result`."""
        self._diagnose = diagnose
        self._result = result or UserDiagnosis()

    @property
    def result(self) -> UserDiagnosis:
        """Result of the diagnosis. If it has not run yet, it runs now."""
        if self._diagnose is not None:
            self._result = self._diagnose()
            self._diagnose = None  # frees the training and its values
        return self._result

    def __reduce__(self) -> tuple[type[LazyDiagnosis], tuple[None, UserDiagnosis]]:
        return LazyDiagnosis, (None, self.result)

    def __copy__(self) -> LazyDiagnosis:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> LazyDiagnosis:
        return self
