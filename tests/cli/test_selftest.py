"""`equivcheck selftest` reports caught mutants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from equivcheck.cli import main
from support.processes import children_of, end_soon

pytestmark = pytest.mark.usefixtures("workers_are_forked")

NAME = "gradients_summed"


def run(*arguments: str) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, ["selftest", *arguments])


def test_a_mutant_is_killed_and_all_of_it_is_told() -> None:
    """The exit code is 0, JSON has all fields, and each mutant has a line on stderr."""
    result = run("--mutants", NAME, "--examples", "10", "--workers", "1", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    (row,) = found["mutants"]
    assert row["name"] == NAME
    assert 0 < row["caught"] == row["reachable"] - row["undecided"]
    assert 0 < row["examples"] <= row["drawn"] <= 10
    shrunk = row["shrunk"]
    assert (shrunk["ranks"], shrunk["layers"], shrunk["steps"]) == (2, 1, 1)
    assert shrunk["small"]
    assert shrunk["minimum"]["because"]
    assert shrunk["repr"].startswith("Scenario(")
    assert (found["kill_rate"], found["reached_rate"]) == (1.0, 1.0)
    assert row["diagnosis_expected"] == "summed"
    assert found["diagnosis_rate"] == float(row["diagnosis_right"])
    assert f"1/1 {NAME}: caught in " in result.stderr


def test_a_mutant_that_is_not_reached_fails_the_selftest() -> None:
    """One example has one rank and reaches no error between ranks, so the exit code is 1."""
    result = run("--mutants", NAME, "--examples", "1", "--workers", "1")
    assert result.exit_code == 1
    assert f"{NAME} had no effect in 1 example" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--mutants", "nope"), NAME),
        (("--examples", "0"), "--examples"),
        (("--seconds-per-mutant", "0"), "--seconds-per-mutant"),
        (("--workers", "0"), "--workers"),
        (("--seed", "-1"), "--seed"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], names: str) -> None:
    """Exit code 2, an empty stdout, and one line on stderr that names the error or the valid choices."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert names in line


@pytest.mark.slow
def test_an_interruption_keeps_what_was_found_and_leaves_no_process() -> None:
    """After Ctrl-C, the first mutant's result is printed with exit code 1, and no process is left."""
    command = [sys.executable, "-m", "equivcheck", "selftest", "--examples", "1", "--workers", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("1/"):
        assert line or process.poll() is None, "it ended before the first mutant"
    children = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    found = json.loads(output)
    assert process.returncode == 1
    assert found["interrupted"]
    assert 1 <= found["examined"] < found["asked"]
    assert children
    assert end_soon(*children)
