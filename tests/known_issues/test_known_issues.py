"""Tests for the upstream issues on file: each can still be shown with torch alone."""

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from equivcheck.known_issues.known import Kind, KnownIssue, known_issues, read_issues
from launched import launched

SCRIPTS = Path(__file__).parent / "scripts"
ISSUES = known_issues()
WRONG_NUMBER = r"max difference (nan|[1-9]|0\.0*[1-9])"


def test_each_issue_has_a_script_and_each_script_an_issue() -> None:
    """What is on file can be shown with torch alone."""
    on_file = read_issues(files("equivcheck.known_issues").joinpath("known.toml").read_text("utf-8"))
    assert sorted(issue.id for issue in on_file) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("issue", ISSUES, ids=[issue.id for issue in ISSUES])
def test_the_issue_still_shows(issue: KnownIssue, tmp_path: Path) -> None:
    """A script on file exits with 1 and prints a wrong number or the error on file; else the issue has been fixed upstream."""
    script = SCRIPTS / f"{issue.id}.py"

    code, printed = launched(script, issue.ranks, tmp_path)

    assert code == 1, f"{issue.id}: fixed upstream? The script exited with {code}:\n{printed}"
    assert re.search(WRONG_NUMBER if issue.kind is Kind.WRONG_NUMBERS else issue.error, printed), printed
    assert f"--nproc-per-node {issue.ranks} {script.name}" in script.read_text("utf-8")


def test_torchrun_shows_it_too() -> None:
    """The command that each script names works; the other tests start the processes themselves, which is faster."""
    issue = next(issue for issue in ISSUES if issue.kind is Kind.WRONG_NUMBERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(issue.ranks)]

    script = str(SCRIPTS / f"{issue.id}.py")
    ran = subprocess.run([*command, script], check=False, capture_output=True, text=True, timeout=120, env=os.environ)

    assert ran.returncode == 1
    assert re.search(WRONG_NUMBER, ran.stdout), ran.stdout + ran.stderr
