"""Running a script as its reader would: by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from equivcheck.errors import EquivCheckError
from equivcheck.system.commands import Ran, run
from equivcheck.system.temporary_folder import temporary_folder


class LaunchFailed(EquivCheckError):
    """A script could not be run to its end."""


def launch(text: str, ranks: int, *, name: str = "repro.py", seconds: float = 180.0) -> Ran:
    """Run a script's text by torchrun on so many processes of this machine. Raises `LaunchFailed` past a limit in seconds.

    The exit code is 1 when a difference shows or a rank fails; torchrun's own lines are among those of stderr.
    """
    with temporary_folder() as folder:
        script = Path(folder) / name
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TMPDIR": folder}
        ran = run(command, seconds=seconds, environment=environment)
    if ran.code is None:
        raise LaunchFailed(f"{name} was not done after {seconds:.0f} s on {ranks} ranks")
    return ran
