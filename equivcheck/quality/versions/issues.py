"""Scripts for known issues, run on another torch version by one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from equivcheck.export.forked import SECONDS, run_forked
from equivcheck.oracle.known_issues.issue_script import write_issue_script
from equivcheck.oracle.known_issues.known import KnownIssue, all_known_issues
from equivcheck.oracle.known_issues.showing import Showing, Shows, showing
from equivcheck.quality.versions.batch import run_tasks, serve_tasks
from equivcheck.quality.versions.environments import Installation
from equivcheck.scenario.file_format.codec import decode, encode
from equivcheck.system.temporary_folder import temporary_folder


def run_scripts(installation: Installation, issues: Iterable[KnownIssue]) -> dict[str, Showing]:
    """Run the known issues' scripts on another torch version, and return the results by issue id."""
    ids = [issue.id for issue in issues]
    results = run_tasks(installation, __name__, ids, seconds=SECONDS, ended=_cannot_run)
    return {name: decode(Showing, result, where="scripts") for name, result in zip(ids, results, strict=True)}


def main() -> None:
    """Run scripts in an interpreter with another torch version, for the process that started it."""
    issues = {issue.id: issue for issue in all_known_issues()}
    serve_tasks(lambda name: encode(_tried(issues[name])))


def _tried(issue: KnownIssue) -> Showing:
    """Run a script, and again if it cannot run, because a machine under load may be the reason."""
    found = _run(issue)
    return _run(issue) if found.shows is Shows.CANNOT_RUN else found


def _run(issue: KnownIssue) -> Showing:
    with temporary_folder() as folder:
        return showing(issue.error, *run_forked(write_issue_script(issue, Path(folder)), issue.ranks, Path(folder)))


def _cannot_run(reason: str) -> Any:
    return encode(Showing(shows=Shows.CANNOT_RUN, reason=reason))
