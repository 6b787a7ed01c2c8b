"""Standard streams may be closed, full, or read by nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from equivcheck.scenario.file_format.codec import to_json
from unit.campaign import fakes

PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}
PROGRESS = """
import os, sys
import click
from equivcheck.cli.options import console
from equivcheck.cli.shell import Shell
from equivcheck.report.campaign.progress import ProgressLine

@click.command()
def works():
    with ProgressLine(console(stderr=True)) as line:
        line._say("starting")
    click.echo("half way", err=True)
    opened = os.open(os.devnull, os.O_RDONLY)
    click.echo(f"done with {opened > 2}")
    return 1

Shell(commands={"works": works})(["works"])
"""


def shell(redirected: str, *command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a shell that redirects its streams."""
    line = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, *command]
    return subprocess.run(line, env=os.environ | PATH, input=stdin, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "<&- 2>&-", "2> >(exec true)"])
def test_a_command_whose_stderr_fails_goes_on_without_it(redirected: str) -> None:
    """Results and exit code stay, and no opened file gets a closed stream's number."""
    ended = shell(redirected, "-c", PROGRESS)
    assert (ended.returncode, ended.stdout) == (1, "done with True\n")


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("check", "--help"), pytest.param(("check", "-"), marks=pytest.mark.slow)]
)
def test_output_that_cannot_be_written_is_exit_code_3(arguments: tuple[str, ...]) -> None:
    """Stderr has one line with the reason."""
    ended = shell(">/dev/full", "-m", "equivcheck", *arguments, stdin=to_json(fakes.scenario()))
    assert ended.returncode == 3
    assert ended.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("redirected", "names"), [(">&-", "standard output"), ("<&-", "standard input")])
def test_a_stream_that_is_needed_and_closed_is_bad_input(redirected: str, names: str) -> None:
    """Nothing runs if its result could not be printed, or its input not be read."""
    ended = shell(redirected, "-m", "equivcheck", "check", "-")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {names} is closed. Expected ")


def test_with_all_streams_closed_the_exit_code_tells() -> None:
    """No stream is left for an error message."""
    assert shell("<&- >&- 2>&-", "-m", "equivcheck", "check", "-").returncode == 2
