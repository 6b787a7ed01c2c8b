"""Terminal output: wrapped text, and commands for readers to copy."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from pathlib import Path

from equivcheck.system.printable import escape_unprintable


def own_command(*arguments: str) -> str:
    """A command for the reader's shell: ``equivcheck replay 1a2b3c``.

    Under tox, it has the program's path, because tox's environment is not on the reader's PATH.
    """
    return shlex.join([_program(), *arguments])


def _program() -> str:
    script = Path(sys.argv[0])
    if "TOX_ENV_NAME" not in os.environ or not script.is_relative_to(Path.cwd()):
        return "equivcheck"
    return str(script.relative_to(Path.cwd()))


WIDTH = 80
"""Columns on a screen."""


def wrap(text: str, indent: str = "") -> list[str]:
    """Wrap into lines of at most `WIDTH` columns, all but the first indented. Long words, such as paths, stay whole."""
    return textwrap.wrap(
        escape_unprintable(text), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
