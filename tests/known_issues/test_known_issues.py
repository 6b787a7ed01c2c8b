"""Tests for the upstream issues on file: each is still there, and each is recognised."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equivcheck.oracle.known import known_issues

SCRIPTS = Path(__file__).parent / "scripts"
ISSUES = {issue.id: issue for issue in known_issues()}


def test_each_issue_has_a_script_and_each_script_an_issue() -> None:
    """What is on file can be shown with torch alone."""
    assert sorted(ISSUES) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("name", sorted(ISSUES))
def test_the_issue_still_shows(name: str) -> None:
    """A script on file exits with 1 for a wrong number or an error; one that does neither has been fixed upstream."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(SCRIPTS / f"{name}.py"),
    ]

    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )

    assert run.returncode == 1, f"{name}: fixed upstream? The script exited with {run.returncode}:\n{run.stdout}{run.stderr}"
    assert re.search(r"max difference [1-9]|max difference 0\.0*[1-9]|Error", run.stdout + run.stderr)
