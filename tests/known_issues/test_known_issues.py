"""Tests for the upstream issues on file: each can still be shown with torch alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equivcheck.oracle.known import Kind, KnownIssue, known_issues

SCRIPTS = Path(__file__).parent / "scripts"
ISSUES = known_issues()
WRONG_NUMBER = r"max difference (nan|[1-9]|0\.0*[1-9])"
SECONDS = 90
"""Until a script is given up; it takes 3 to 6, and 20 more if a rank waits in vain."""


def run(script: Path, ranks: int) -> tuple[int, str]:
    """Exit code and output of a script under torchrun, which ends its ranks when it is terminated (but not when it is killed)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    with process:
        try:
            printed, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            printed, _ = process.communicate()
    return process.returncode, printed


def test_each_issue_has_a_script_and_each_script_an_issue() -> None:
    """What is on file can be shown with torch alone."""
    assert sorted(issue.id for issue in ISSUES) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("issue", ISSUES, ids=[issue.id for issue in ISSUES])
def test_the_issue_still_shows(issue: KnownIssue) -> None:
    """A script on file exits with 1 and prints a wrong number or the error on file; else the issue has been fixed upstream."""
    script = SCRIPTS / f"{issue.id}.py"

    code, printed = run(script, issue.ranks)

    assert code == 1, f"{issue.id}: fixed upstream? The script exited with {code}:\n{printed}"
    assert re.search(WRONG_NUMBER if issue.kind is Kind.WRONG_NUMBERS else issue.error, printed), printed
    assert f"--nproc-per-node {issue.ranks} {script.name}" in script.read_text("utf-8")
