"""Why a user's training diverged or failed, computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivcheck.oracle.verdict.cause import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class UserDiagnosis:
    """Results from the search for a cause, from the search for the first wrong module, and from the type checker."""

    cause: str = ""
    """Mistake with the values of all ranks; empty if no mistake reproduces them."""
    kinds: tuple[Cause, ...] = ()
    """Short names for the cause."""
    where: str = ""
    """First module whose output, or output gradient, differs; empty if no module is known."""
    types: str = ""
    """Result from the spmd_types type checker; empty if it did not run."""
    hint: str = ""
    """Possible explanation that is not proven. Empty if there is a cause."""
    unexplained: str = ""
    """Why no cause is known, such as the number of tried mistakes. Empty if there is a cause, or if no search took place."""
    unfinished: str = ""
    """Part of the diagnosis that failed, with its error; empty if nothing failed."""


class LazyDiagnosis:
    """Diagnosis of one verdict, which runs when it is first read, and only once.

    If it is interrupted, the next read starts it again. Pickling runs it first, because the training cannot be pickled with it.
    """

    def __init__(self, diagnose: Callable[[], UserDiagnosis] | None = None, result: UserDiagnosis | None = None) -> None:
        """`diagnose` computes the result; without it, the result is `result`."""
        self._diagnose = diagnose
        self._result = result or UserDiagnosis()

    @property
    def result(self) -> UserDiagnosis:
        """Result of the diagnosis. The diagnosis runs now if it has not run before."""
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
