"""Properties that all commands share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from equivcheck.cli.shell import Shell
from equivcheck.system.collection import COLLECTION_THRESHOLDS

SCRIPT = """
import os, sys
import click
from equivcheck.cli.shell import Shell
from equivcheck.system.commands import run

CHILD = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"

@click.command()
def waits():
    run([sys.executable, "-c", CHILD, sys.argv[1]], seconds=None, environment=os.environ)

Shell(commands={"waits": waits})(["waits"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """It ends its child processes, prints one line, and exits with 3."""
    fifo = tmp_path / "child"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(fifo)], stderr=subprocess.PIPE, text=True)
    child = int(fifo.read_text())

    process.send_signal(number)
    _, errors = process.communicate()

    assert (process.returncode, errors.strip()) == (3, "error: interrupted")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_command_collects_garbage_rarely() -> None:
    """This saves a fifth of the time for importing torch. The caller's thresholds are restored."""
    found, before = [], gc.get_threshold()
    command = click.Command("looks", callback=lambda: found.append(gc.get_threshold()))
    gc.set_threshold(700, 10, 10)
    try:
        with pytest.raises(SystemExit):
            Shell(commands={"looks": command})(["looks"])
        found.append(gc.get_threshold())
    finally:
        gc.set_threshold(*before)
    assert found == [COLLECTION_THRESHOLDS, (700, 10, 10)]


IMPORTING = """
import click
from equivcheck.cli.shell import Shell

@click.command()
def imports():
    import unit.worlds.gloo.endless_import

Shell(commands={"imports": imports})(["imports"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_imports_is_ended_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """An import may swallow the interrupt, as torch's does, but the command ends anyway."""
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    environment = os.environ | {"EQUIVCHECK_TEST_PID": str(fifo), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", IMPORTING], stderr=subprocess.PIPE, text=True, env=environment)
    assert int(fifo.read_text()) == process.pid

    process.send_signal(number)
    _, errors = process.communicate()

    assert (process.returncode, errors.strip()) == (3, "error: interrupted")
