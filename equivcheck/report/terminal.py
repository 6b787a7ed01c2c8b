"""Commands that readers can copy into their shell."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def own_command(*arguments: str) -> str:
    """Return a command for the reader's shell, such as ``equivcheck replay 1a2b3c``.

    Under tox, the command contains the program's path, because tox's environment is not on the reader's PATH.
    """
    return shlex.join([_program(), *arguments])


def _program() -> str:
    script = Path(sys.argv[0])
    if "TOX_ENV_NAME" not in os.environ or not script.is_relative_to(Path.cwd()):
        return "equivcheck"
    return str(script.relative_to(Path.cwd()))
