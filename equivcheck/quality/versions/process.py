"""Processes with another interpreter and its torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import equivcheck
from equivcheck.system.commands import Ran, run
from equivcheck.system.temporary_folder import temporary_folder

_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables for this interpreter only."""


def run_python(python: Path, arguments: Sequence[str], *, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
    """Run an interpreter with this equivcheck on its path, and nothing else from this environment.

    The process and its children end after `seconds`, or if this process is interrupted.
    """
    with temporary_folder() as folder:
        Path(folder, "equivcheck").symlink_to(Path(equivcheck.__path__[0]).resolve(), target_is_directory=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS}
        path = {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
        return run([str(python), *arguments], seconds=seconds, environment=inherited | dict(variables or {}) | path)
