"""torch's own tests of its collectives and of DDP, on simulated ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peer.applicability import NOT_APPLICABLE, NUM_PASSED, NUM_SKIPPED

PROGRAM = Path(__file__).with_name("program.py")


def run(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    """What the program said of each test last: of one that ended the process, its name alone."""
    left_out = [f"-{name}" for name in NOT_APPLICABLE]
    done = subprocess.run([sys.executable, PROGRAM, folder, *(names or left_out)], capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records, done.stderr
    return {record["name"]: record for record in records}


def outcome_of(record: dict[str, Any]) -> str:
    """``passed``, ``skipped``, or what went wrong."""
    if "ranks" not in record:
        return str(record.get("failed", "it ended the process"))
    return "skipped" if all(found.startswith("skipped") for found in record["ranks"]) else "passed"


@pytest.mark.slow
@pytest.mark.torch(">=2.13,<2.14", "the file of every version has other tests")
def test_torchs_own_tests_pass(tmp_path: Path) -> None:
    """Every test of torch's file that applies passes on eight simulated ranks, as over gloo."""
    outcomes = {name: outcome_of(record) for name, record in run(tmp_path).items()}
    wrong = {name: text for name, text in outcomes.items() if text not in ("passed", "skipped")}
    assert not wrong
    assert Counter(outcomes.values()) == {"passed": NUM_PASSED, "skipped": NUM_SKIPPED}


@pytest.mark.slow
@pytest.mark.torch(">=2.13,<2.14", "the file of every version has other tests")
def test_what_does_not_apply_fails(tmp_path: Path) -> None:
    """No test is left out that would pass."""
    outcomes = {name: outcome_of(record) for name, record in run(tmp_path, *NOT_APPLICABLE).items()}
    assert outcomes.keys() == NOT_APPLICABLE.keys()
    assert not [name for name, text in outcomes.items() if text in ("passed", "skipped")]
