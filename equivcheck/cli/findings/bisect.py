"""`equivcheck bisect`: find the torch versions with a finding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.findings.replay import find
from equivcheck.cli.options import json_option, print_json, seconds_option, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.cli.torch_options import environment_options, environments, torch_option
from equivcheck.errors import UsageError, unknown_name
from equivcheck.system.printable import escape_unprintable

if TYPE_CHECKING:
    from equivcheck.campaign.findings.versions import ShownIn
    from equivcheck.oracle.known_issues.known import KnownIssue
    from equivcheck.quality.versions.environments import Installation

SECONDS = 300.0
"""Time limit for each version."""


@click.command()
@click.argument("finding", required=False)
@click.option("--id", "issue_id", metavar="ISSUE", help="Run the script of this known issue instead of a finding.")
@torch_option
@click.option("--all", "every", is_flag=True, help="Measure every version, not only those that bisection needs.")
@seconds_option("Time limit for each version.", SECONDS)
@environment_options
@store_option
@json_option
def bisect(  # noqa: PLR0913, PLR0917 - options
    finding: str | None,
    issue_id: str | None,
    versions: str,
    every: bool,
    seconds: float,
    pythons: tuple[Installation, ...],
    cache: Path | None,
    index_url: str,
    store: Path,
    as_json: bool,
) -> ExitCode:
    """Find the torch versions that show a finding.

    FINDING is a folder, or the first digits of a fingerprint. Its exported script runs on each version. If a
    finding has no script, it is replayed instead. The result is kept in the finding's folder.
    """
    if (finding is None) == (issue_id is None):
        raise UsageError("bisect needs a finding or --id with a known issue. Expected one of them")
    from equivcheck.campaign.findings.finding import Finding, write_versions
    from equivcheck.quality.versions.measuring import Search

    # Look up the finding first, because asking the package index for versions takes seconds.
    sought = find(str(finding), store) if issue_id is None else _issue(issue_id)
    where = environments(pythons, cache, index_url)
    search = Search(versions=where.find_versions(versions), environments=where, seconds=seconds, every=every)
    shown_in = search.of_finding(sought) if isinstance(sought, Finding) else search.of_issue(sought)
    if as_json:
        print_json(_object(shown_in))
    else:
        _print(shown_in, with_range=issue_id is not None)
    if isinstance(sought, Finding):
        write_versions(sought, shown_in)
    if shown_in.shows:
        return ExitCode.FINDINGS
    return ExitCode.NOTHING_FOUND if shown_in.could_run else ExitCode.CANNOT_RUN


def _issue(issue_id: str) -> KnownIssue:
    from equivcheck.oracle.known_issues.known import all_known_issues

    issues = {issue.id: issue for issue in all_known_issues()}
    if issue_id not in issues:
        raise unknown_name("known issue", issue_id, sorted(issues))
    return issues[issue_id]


def _object(shown_in: ShownIn) -> dict[str, Any]:
    from equivcheck.scenario.file_format.codec import encode

    skipped = list(shown_in.skipped_versions)
    return {**encode(shown_in), "unmeasured": skipped, "result": str(shown_in), "ranges": shown_in.specifiers}


def _print(shown_in: ShownIn, *, with_range: bool) -> None:
    for found in shown_in.measured:
        click.echo(escape_unprintable(f"torch {found.torch:<8} {found.showing}"))
    if shown_in.skipped_versions:
        click.echo(f"not measured, because the versions around them agree: {', '.join(shown_in.skipped_versions)}")
    click.echo(escape_unprintable(str(shown_in)))
    if with_range and shown_in.shows:
        click.echo(f"range: {' or '.join(shown_in.specifiers)}")
