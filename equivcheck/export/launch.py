"""Runs a script with torchrun, as its reader would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from equivcheck.errors import EquivCheckError
from equivcheck.system.commands import FinishedCommand, run
from equivcheck.system.temporary_folder import temporary_folder


class LaunchFailed(EquivCheckError):
    """Error if a script does not end within its time limit."""


def launch(text: str, ranks: int, *, name: str = "repro.py", seconds: float = 180.0) -> FinishedCommand:
    """Save the text of a script as `name`, and run it with torchrun on `ranks` local processes.

    Raises `LaunchFailed` after `seconds`. The exit code is 1 if the runs differ or a rank fails. stderr also contains torchrun's
    own lines.
    """
    with temporary_folder() as folder:
        script = Path(folder) / name
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TMPDIR": folder}
        ran = run(command, seconds=seconds, environment=environment)
    if ran.code is None:
        raise LaunchFailed(f"{name} did not finish within {seconds:.0f} s on {ranks} ranks")
    return ran
