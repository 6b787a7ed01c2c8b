"""Ctrl-C, SIGTERM, and the sudden death of the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import children_of, end_soon, soon

SCRIPT = """
import json, sys
from unit.campaign import fakes
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.findings.store import FindingStore

def tell(event):
    if type(event).__name__ == "Ticked" and event.seconds and event.num_findings >= int(sys.argv[3]):
        print("running", flush=True)

check = getattr(fakes, sys.argv[2])
plan = Plan(num_checks=1_000_000, seed=0, num_workers=2, strategy=fakes.some_scenarios, check=check)
summary = fuzz(plan, FindingStore(sys.argv[1]), [tell])
print(json.dumps({"interrupted": summary.interrupted, "findings": len(summary.findings), "checks": summary.tally.num_checks}))
"""

PATIENCE = 120.0
"""Seconds for what takes one on a quiet machine."""


def started(store: Path, check: str, num_findings: int = 0, temporary: Path | None = None) -> subprocess.Popen[str]:
    """A campaign without end, to speak of, in a process of its own, once its workers are at work and have found so much."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    environment |= {"TMPDIR": str(temporary)} if temporary else {}
    command = [sys.executable, "-c", SCRIPT, str(store), check, str(num_findings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_it_with_a_summary_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """After a signal the campaign ends, keeps and counts what it found, and all of its workers are gone."""
    process = started(tmp_path / "findings", "wide_diverges", 1)
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


def test_an_interruption_does_not_wait_for_a_check_that_hangs(tmp_path: Path) -> None:
    """A worker that does not come back from its check is killed, and that is no finding."""
    process = started(tmp_path / "findings", "long_hangs")
    workers = children_of(process.pid)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert json.loads(output.splitlines()[-1])["findings"] == 0
    assert end_soon(*workers)


def test_workers_do_not_outlive_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    """Workers end when nobody is left to tell."""
    process = started(tmp_path / "findings", "fine")
    workers = children_of(process.pid)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert len(workers) == 2
    assert end_soon(*workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_campaign_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    """Those of checks that were running are gone with the workers, also where nobody was left to end these."""
    (temporary := tmp_path / "temporary").mkdir()
    process = started(tmp_path / "findings", "long_hangs_with_a_folder", temporary=temporary)
    assert soon(lambda: len(list(temporary.iterdir())) == 2)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert soon(lambda: not list(temporary.iterdir()))
