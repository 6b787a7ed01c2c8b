"""`equivcheck report`: write a page or an issue about a run, or a page about a finding."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import json_option, output_file, print_json, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.errors import UsageError
from equivcheck.system.printable import escape_unprintable

if TYPE_CHECKING:
    from equivcheck.campaign.history.run import Run
    from equivcheck.report.issue_text import Reported

_DEFAULT_NAME, _DEFAULT_OF_FINDING = Path("equivcheck_report.html"), Path("equivcheck_finding.html")
_DEADLINE = 60.0
"""Deadline for the run shown on a finding's page, in seconds."""


@click.command()
@click.argument("finding", required=False)
@store_option
@click.option("--run", metavar="RUN", default="", help="First digits of a run's ID.  [default: the last run]")
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M"]),
    metavar="DATE",
    help="With --format issue: cover all runs since this date or time (UTC), for example 2026-01-31 or 2026-01-31T08:00.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "issue"]),
    default="html",
    show_default=True,
    help="An HTML page, or a Markdown issue (title, empty line, text) about the findings that fail the run.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    callback=output_file,
    metavar="FILE",
    help=f"File to write or replace.  [default: {_DEFAULT_NAME}, {_DEFAULT_OF_FINDING}; stdout for an issue]",
)
@json_option
def report(  # noqa: PLR0913, PLR0917 - options
    finding: str | None, store: Path, run: str, since: datetime | None, form: str, output: Path | None, as_json: bool
) -> ExitCode:
    """Write a page or an issue about a run or a finding.

    Without FINDING it is about a run of fuzz, read from the store's history. With FINDING (a folder, or the first digits of a
    fingerprint), its ranks run once more in a separate process, and the page shows their tensors and calls. Pages are single
    files. A finding's page contains a script. The command may run it once, to choose weights and inputs that show the failure.
    """
    if since is not None and (run or form != "issue"):
        raise UsageError(
            "--since is only valid with --format issue, and not together with --run. Expected --since DATE --format issue"
        )
    if finding is not None:
        if run or form == "issue":
            raise UsageError(
                "a finding is not valid with --run or --format issue, because these report on runs. "
                "Expected a finding without these options, or no finding"
            )
        return _report_finding(finding, store, output or _DEFAULT_OF_FINDING, as_json=as_json)
    if form == "issue":
        return _report_issue(store, _runs(store, run, since), output, as_json=as_json)
    from equivcheck.report.run_page.page import write_page

    page = output or _DEFAULT_NAME
    past = write_page(page, store, run)
    if as_json:
        print_json({"path": str(page), "run": past.run.id, "mode": past.run.mode.value, "began": past.run.began})
    else:
        click.echo(escape_unprintable(f"{page}: run {past.run.id}, {past.run.mode.value}, began {past.run.began[:19]} UTC"))
    return ExitCode.NOTHING_FOUND


def _report_finding(named: str, store: Path, page: Path, *, as_json: bool) -> ExitCode:
    from equivcheck.cli.findings.replay import find
    from equivcheck.cli.findings.script import script_or_reason
    from equivcheck.report.finding_page.page import PageContext, write_page
    from equivcheck.report.finding_page.second_run import run_isolated

    kept = find(named, store)
    script, why = script_or_reason(kept.verdict, seen_on=kept.environment.torch)
    folder = shlex.quote(str(kept.path))
    commands = (f"equivcheck replay {folder}", f"equivcheck export {folder} -o repro.py")
    told = PageContext(script=script, why_no_script=why, commands=commands, kept=kept)
    write_page(kept.verdict, page, told, partial(run_isolated, deadline=_DEADLINE))
    if as_json:
        print_json({"path": str(page), "finding": kept.fingerprint, "outcome": kept.verdict.outcome.value})
    else:
        click.echo(escape_unprintable(f"{page}: {kept.fingerprint} {kept.verdict.case.name}, {kept.verdict.outcome.value}"))
    return ExitCode.NOTHING_FOUND


def _runs(store: Path, prefix: str, since: datetime | None) -> tuple[Run, ...]:
    """Return the named run or the last run; with `since`, all runs from that time on, oldest first."""
    from equivcheck.campaign.history.history import History
    from equivcheck.campaign.history.past import find_run, past_runs

    if since is None:
        return (find_run(History(store), prefix).run,)
    runs = (past.run for past in past_runs(History(store)))
    found = tuple(takewhile(lambda run: run.began >= since.isoformat(), runs))[::-1]
    if not found:
        raise UsageError(
            escape_unprintable(
                f"--since is not valid: no run of {store} began at {since:%Y-%m-%d %H:%M} UTC or later. Expected an earlier time"
            )
        )
    return found


def _report_issue(store: Path, runs: Sequence[Run], output: Path | None, *, as_json: bool) -> ExitCode:
    from equivcheck.report.issue_text import issue_text, issue_title
    from equivcheck.system.files import replace_text

    reported = list(_reported(store, runs))
    if not reported:
        which = ", ".join(f"run {run.id}" for run in runs)
        click.echo(f"{which}: no finding that makes it fail, so there is no issue to write", err=True)
    title, text = (issue_title(runs, reported), issue_text(runs, reported)) if reported else (None, None)
    if reported and output is not None:
        replace_text(output, f"{title}\n\n{text}")
    if as_json:
        print_json({"run": runs[-1].id, "runs": [run.id for run in runs], "title": title, "text": text})
    elif reported and output is None:
        click.echo(f"{title}\n\n{text}", nl=False)
    return ExitCode.NOTHING_FOUND


def _reported(store: Path, runs: Sequence[Run]) -> Iterator[Reported]:
    """Findings that make a run fail, each once. Unreadable findings are named on stderr."""
    from equivcheck.campaign.findings.store import FindingStore
    from equivcheck.campaign.history.history import History
    from equivcheck.campaign.history.standing import failing
    from equivcheck.cli.findings.script import script_or_reason
    from equivcheck.report.issue_text import Reported

    for record in failing(History(store), runs):
        try:
            finding = FindingStore(store).load(record.fingerprint)
        except UsageError as error:
            click.echo(escape_unprintable(str(error)), err=True)
            continue
        script, why = script_or_reason(finding.verdict, seen_on=finding.environment.torch)
        yield Reported(record=record, finding=finding, script=script, why_no_script=why)
