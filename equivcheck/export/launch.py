"""Running a script as its reader would: by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from equivcheck.errors import EquivCheckError
from equivcheck.system.temporary_folder import temporary_folder


class LaunchFailed(EquivCheckError):
    """A script could not be run to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a script did."""

    code: int
    """Its exit code: 1 when a difference shows or a rank fails."""
    printed: str
    """What it printed on stdout."""
    errors: str
    """What it printed on stderr, torchrun's own lines among it."""


def launch(text: str, ranks: int, *, name: str = "repro.py", seconds: float = 180.0) -> Launched:
    """Run a script's text by torchrun on so many processes of this machine. Raises `LaunchFailed` past a limit in seconds."""
    with temporary_folder() as folder:
        script = Path(folder) / name
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TMPDIR": folder}
        try:
            ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds, env=environment)
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"{name} was not done after {seconds:.0f} s on {ranks} ranks") from None
    return Launched(code=ran.returncode, printed=ran.stdout, errors=ran.stderr)
