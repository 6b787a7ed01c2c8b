"""Tests for the known issues: each script shows its issue with torch only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from equivcheck.export.forked import run_forked
from equivcheck.oracle.known_issues.issue_script import SCRIPTS, write_issue_script
from equivcheck.oracle.known_issues.known import IssueKind, KnownIssue, all_known_issues, known_issues
from equivcheck.oracle.known_issues.showing import Shows, measured_results, read_table, showing, table_path, written_table
from equivcheck.system.torch_version import OLDEST

HERE = known_issues()
"""Known issues of the installed torch."""


def test_each_issue_has_a_script_and_each_script_an_issue() -> None:
    """Ids and file names are the same."""
    assert sorted(issue.id for issue in all_known_issues()) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.corpus
@pytest.mark.parametrize("issue", HERE, ids=[issue.id for issue in HERE])
def test_the_issue_still_shows(issue: KnownIssue, tmp_path: Path) -> None:
    """The script needs torch only, exits with 1, and prints a difference or the error; otherwise torch has been fixed."""
    script = write_issue_script(issue, tmp_path)

    code, printed = run_forked(script, issue.ranks, tmp_path)

    found = showing(issue.error, code, printed)
    assert found.shows is Shows.SHOWS, f"{issue.id}: fixed upstream? The script {found}, with exit code {code}:\n{printed}"
    text = script.read_text("utf-8")
    assert f"--nproc-per-node {issue.ranks} {script.name}" in text
    assert "equivcheck" not in text


def test_every_issue_was_tried_on_every_version() -> None:
    """Each issue has a row in shows.toml, and all rows have the same versions, beginning with the oldest supported one."""
    columns = {tuple(row) for row in measured_results().values()}
    assert measured_results().keys() == {issue.id for issue in all_known_issues()}
    assert len(columns) == 1
    (versions,) = columns
    assert list(versions) == sorted(versions, key=Version)
    assert SpecifierSet(f"=={OLDEST}.*").contains(versions[0])


def test_the_table_is_what_the_command_writes() -> None:
    """The next `--write-shows` would not undo an edit."""
    text = table_path().read_text("utf-8")
    assert written_table(read_table(text)) == text


@pytest.mark.slow
def test_torchrun_shows_it_too(tmp_path: Path) -> None:
    """The torchrun command in the scripts works. The other tests start processes by themselves because that is faster."""
    issue = next(issue for issue in HERE if issue.kind is IssueKind.WRONG_NUMBERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(issue.ranks)]

    script = write_issue_script(issue, tmp_path)
    ran = subprocess.run([*command, str(script)], check=False, capture_output=True, text=True, timeout=600, env=os.environ)

    assert showing(issue.error, ran.returncode, ran.stdout).shows is Shows.SHOWS, ran.stdout + ran.stderr
