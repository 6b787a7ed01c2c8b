"""Tests for the upstream issues on file: each shows with torch alone, in the versions of torch that it is on file for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from equivcheck.export.forked import launched
from equivcheck.oracle.known_issues.known import Kind, KnownIssue, issues_on_file, known_issues, script_path
from equivcheck.oracle.known_issues.showing import Shows, measured, read_table, showing, table_path, written_table
from equivcheck.system.torch_version import OLDEST

HERE = known_issues()
"""Those of the installed torch."""


def test_each_issue_has_a_script_and_each_script_an_issue() -> None:
    """What is on file can be shown with torch alone."""
    scripts = script_path("any").parent.glob("*.py")
    assert sorted(issue.id for issue in issues_on_file()) == sorted(path.stem for path in scripts)


@pytest.mark.corpus
@pytest.mark.parametrize("issue", HERE, ids=[issue.id for issue in HERE])
def test_the_issue_still_shows(issue: KnownIssue, tmp_path: Path) -> None:
    """A script on file exits with 1 and prints a wrong number or the error on file; else the issue has been fixed upstream."""
    script = script_path(issue.id)

    code, printed = launched(script, issue.ranks, tmp_path)

    found = showing(issue, code, printed)
    assert found.shows is Shows.SHOWS, f"{issue.id}: fixed upstream? The script {found}, with exit code {code}:\n{printed}"
    assert f"--nproc-per-node {issue.ranks} {script.name}" in script.read_text("utf-8")


@pytest.mark.parametrize("issue", issues_on_file(), ids=[issue.id for issue in issues_on_file()])
def test_an_issue_is_on_file_for_the_versions_that_it_was_seen_in(issue: KnownIssue) -> None:
    """The version range has each measured version in which the script shows the issue, and none of the others."""
    assert {version: str(found) for version, found in measured()[issue.id].items() if not found.agrees(issue, version)} == {}


def test_every_issue_was_tried_on_every_version() -> None:
    """The table has a row for each issue, and all rows have the same versions, from the oldest supported minor version on."""
    columns = {tuple(row) for row in measured().values()}
    assert measured().keys() == {issue.id for issue in issues_on_file()}
    assert len(columns) == 1
    (versions,) = columns
    assert list(versions) == sorted(versions, key=Version)
    assert SpecifierSet(f"=={OLDEST}.*").contains(versions[0])


def test_the_table_is_what_the_command_writes() -> None:
    """Nobody has edited it by hand in a way that the next measurement would undo."""
    text = table_path().read_text("utf-8")
    assert written_table(read_table(text)) == text


@pytest.mark.slow
def test_torchrun_shows_it_too() -> None:
    """The command that each script names works; the other tests start the processes themselves, which is faster."""
    issue = next(issue for issue in HERE if issue.kind is Kind.WRONG_NUMBERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(issue.ranks)]

    script = str(script_path(issue.id))
    ran = subprocess.run([*command, script], check=False, capture_output=True, text=True, timeout=600, env=os.environ)

    assert showing(issue, ran.returncode, ran.stdout).shows is Shows.SHOWS, ran.stdout + ran.stderr
