"""What torch keeps here, found in a process of its own: importing all of torch would show in this one."""

from __future__ import annotations

import subprocess
import sys

from equivcheck.errors import EquivCheckError
from equivcheck.system.parent_death import tied


def found_here() -> tuple[str, ...]:
    """The full names. Takes as long as importing most of torch, some ten seconds."""
    ended = subprocess.run(tied([sys.executable, "-m", "equivcheck.worlds.audit"]), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EquivCheckError(f"torch could not be looked through: {ended.stderr.strip().splitlines()[-1:]}")
    return tuple(ended.stdout.split())
