"""Searches torch's state in a separate process, because importing all of torch would change this process."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

from equivcheck.errors import EquivCheckError
from equivcheck.system.parent_death import command_tied_to_parent


class Search:
    """A search through torch's process-wide state, which runs in the background because its imports take seconds.

    Leaving the context ends it.
    """

    def __init__(self) -> None:
        command = command_tied_to_parent([sys.executable, "-m", "equivcheck.worlds.audit"])
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def names(self) -> tuple[str, ...]:
        """Wait for the search, and return the full names of all variables, flags and caches that it found in torch.

        Raises `EquivCheckError` if the search fails.
        """
        printed, errors = self._process.communicate()
        if self._process.returncode:
            raise EquivCheckError(f"the search through torch's state failed: {errors.strip().rpartition(chr(10))[2]}")
        return tuple(printed.split())
