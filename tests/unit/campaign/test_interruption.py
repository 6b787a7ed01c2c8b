"""Ctrl-C, SIGTERM, and the sudden death of the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import children_of, end_soon, soon, what_it_does

SCRIPT = """
import json, sys
from unit.campaign import fakes
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.findings.store import FindingStore

is_told = False

def tell(event):
    global is_told
    if not is_told and type(event).__name__ == "Ticked" and event.seconds and event.num_findings >= int(sys.argv[3]):
        is_told = True
        print("running", flush=True)

check = getattr(fakes, sys.argv[2])
plan = Plan(num_checks=1_000_000, seed=0, num_workers=2, strategy=fakes.some_scenarios, check=check)
summary = fuzz(plan, FindingStore(sys.argv[1]), [tell])
print(json.dumps({"interrupted": summary.interrupted, "findings": len(summary.findings), "checks": summary.tally.num_checks}))
"""

PATIENCE = 120.0
"""Seconds for what takes one on a quiet machine."""


@contextlib.contextmanager
def started(store: Path, check: str, *, num_findings: int = 0, temporary: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A campaign without end, to speak of, in a process of its own, once its workers are at work and have found so much."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    environment |= {"TMPDIR": str(temporary)} if temporary else {}
    command = [sys.executable, "-c", SCRIPT, str(store), check, str(num_findings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_it_with_a_summary_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """After a signal the campaign ends, keeps and counts what it found, and all of its workers are gone."""
    with started(tmp_path / "findings", "wide_diverges", num_findings=1) as process:
        workers = children_of(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE)
    summary = json.loads(output.splitlines()[-1])
    assert summary["interrupted"]
    assert summary["findings"] == 1
    assert process.returncode == 0
    assert len(workers) == 2
    assert end_soon(*workers)
    assert len(list((tmp_path / "findings").glob("*/scenario.json"))) == 1


def test_workers_do_not_outlive_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    """Workers end when nobody is left to tell."""
    with started(tmp_path / "findings", "fine") as process:
        workers = children_of(process.pid)
        process.kill()
        process.communicate(timeout=PATIENCE)
    assert len(workers) == 2
    assert end_soon(*workers)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_checks_that_hang_end_with_the_campaign(tmp_path: Path, number: signal.Signals) -> None:
    """They are no findings, and neither processes nor folders of theirs are left, also where nobody was left to end them."""
    (temporary := tmp_path / "temporary").mkdir()
    with started(tmp_path / "findings", "hangs_with_a_folder", temporary=temporary) as process:
        workers = children_of(process.pid)
        assert soon(lambda: len(list(temporary.iterdir())) == 2), (list(temporary.iterdir()), *map(what_it_does, workers))
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE)
    assert [json.loads(line)["findings"] for line in output.splitlines()] == ([] if number == signal.SIGKILL else [0])
    assert len(workers) == 2
    assert end_soon(*workers)
    assert soon(lambda: not list(temporary.iterdir()))
