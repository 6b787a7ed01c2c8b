"""`equivcheck record`: run a command, and record its training."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

import click

import equivcheck
from equivcheck.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), required=True, help="Folder for the trace.")
@click.option("--steps", type=click.IntRange(min=1), help="Number of steps to record.  [default: all]")
@click.option("--from-step", type=click.IntRange(min=0), default=0, show_default=True, help="First step to record.")
@click.option(
    "--moved",
    type=click.IntRange(0, 32),
    default=0,
    help="Change initial parameters by rounding errors; each number from 1 to 32 gives others, and 0 gives none.",
)
@click.option(
    "--outputs",
    is_flag=False,
    flag_value="*",
    default="",
    metavar="[PATTERNS]",
    help="Also record the outputs of all modules, or only of the named ones, for example --outputs='layers.*,head'.",
)
@click.option(
    "--cuts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file with the sharding of plain tensors: a table mesh such as {dp = 2, tp = 4}, and a table cuts such as "
    '{"up.*" = [[0, "tp"]]}.',
)
@click.option(
    "--names",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='TOML file with names in this run and in another run: "new.*.weight" = "old.*.weight".',
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def record(  # noqa: PLR0913, PLR0917 - options
    folder: Path,
    steps: int | None,
    from_step: int,
    moved: int,
    outputs: str,
    cuts: Path | None,
    names: Path | None,
    command: tuple[str, ...],
) -> NoReturn:
    """Run a training script, and record its training.

    COMMAND follows --, for example: equivcheck record -o A -- torchrun train.py. The script needs no change.
    Each rank writes a file to the folder. Compare two folders with `equivcheck compare`. The exit code is that of the command.
    """
    if any(folder.glob("rank*.ecr")):
        raise UsageError(f"folder {folder} is not valid: it already has a trace. Expected a new folder.")
    arguments: dict[str, Any] = {
        "folder": str(folder.absolute()),
        "steps": steps,
        "from_step": from_step,
        "moved": moved,
        "outputs": outputs,
    }
    if cuts is not None:
        from equivcheck.recording.adapters.cuts import load_cuts

        arguments |= load_cuts(cuts)
    if names is not None:
        from equivcheck.recording.adapters.names import load_names

        arguments["names"] = load_names(names)
    if option := _isolating_option(command):
        raise UsageError(
            f"command {shlex.join(command)} is not valid: with {option}, Python does not import the `sitecustomize` that starts "
            f"the recording. Expected a command without {option}."
        )
    startup = Path(equivcheck.__file__).parent / "recording" / "startup"
    path = os.pathsep.join(filter(None, [str(startup), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"EQUIVCHECK_RECORD": json.dumps(arguments), "PYTHONPATH": path}
    try:
        os.execvpe(command[0], command, environment)  # in place of this process, so that signals reach the command
    except OSError as error:
        raise UsageError(f"command {command[0]!r} is not valid: {error.strerror or error}. Expected a program.") from error


def _isolating_option(command: tuple[str, ...]) -> str:
    """Return an option of the command with which Python does not import `sitecustomize` from PYTHONPATH.

    Empty if there is none.
    """
    if not re.fullmatch(r"(python|pypy)[\d.]*t?(\.exe)?", Path(command[0]).name):
        return ""
    own = itertools.takewhile(lambda each: re.match(r"-[^cm-]", each), command[1:])
    flags = "".join(re.split("[cmWX]", each[1:])[0] for each in own)  # these four have a value
    return next((f"-{letter}" for letter in flags if letter in "IES"), "")
