"""What torch keeps here, found in a process of its own: importing all of torch would show in this one."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

from equivcheck.errors import EquivCheckError
from equivcheck.system.parent_death import tied


class Search:
    """A search through torch that has begun. It takes some seconds, most of them for imports; leaving it ends it."""

    def __init__(self) -> None:
        command = tied([sys.executable, "-m", "equivcheck.worlds.audit"])
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def names(self) -> tuple[str, ...]:
        """Wait for the end, and return the full names. Raises `EquivCheckError` if torch could not be searched."""
        printed, errors = self._process.communicate()
        if self._process.returncode:
            raise EquivCheckError(f"torch could not be looked through: {errors.strip().splitlines()[-1:]}")
        return tuple(printed.split())


def found_here() -> tuple[str, ...]:
    """The full names of what torch keeps here."""
    with Search() as search:
        return search.names()
