"""Runs a campaign for a command, with a progress line, a history and an exit code."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.options import COLUMNS, console, print_json
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from equivcheck.campaign.events import Summary
    from equivcheck.campaign.findings.finding import Finding
    from equivcheck.campaign.findings.store import FindingStore
    from equivcheck.campaign.history.run import Run
    from equivcheck.campaign.history.standing import Record
    from equivcheck.campaign.history.writer import HistoryWriter
    from equivcheck.campaign.plan import Plan
    from equivcheck.campaign.workers.crew import CampaignWorkers
    from equivcheck.oracle.verdict.verdict import CaseVerdict


def run_campaign(  # noqa: PLR0913 - options, most by keyword
    plan: Plan,
    folder: Path,
    run: Run,
    *,
    as_json: bool,
    verbose: bool = False,
    html: Path | None = None,
    crew: CampaignWorkers[Any] | None = None,
) -> ExitCode:
    """Run a campaign, print its summary and its findings, and return the exit code.

    `folder` is the store, and `run` describes the campaign in the history. If `html` is given, also write a page to this file.
    `crew` replaces the workers on this machine.
    """
    from equivcheck.campaign.findings.store import FindingStore
    from equivcheck.campaign.history.writer import HistoryWriter
    from equivcheck.campaign.supervisor import fuzz
    from equivcheck.report.campaign.progress import ProgressLine
    from equivcheck.report.campaign.summary_object import summary_object

    store = FindingStore(folder)
    store.require_writable()
    writer = HistoryWriter(store, run)
    if run.mode.replays:
        _replay(store, plan, writer)
    with ProgressLine(console(stderr=True)) as progress:
        summary = fuzz(plan, store, [progress, writer], crew)
    values = summary_object(summary)
    writer.summarized(values)
    told = _told(store, writer)
    if html is not None:
        from equivcheck.campaign.history.history import HistoryFailed
        from equivcheck.report.run_page.page import write_page

        try:
            if writer.failed:
                raise HistoryFailed(writer.failed)
            write_page(html, store.path, writer.run.id)
        except (HistoryFailed, OSError) as error:
            click.echo(f"{html} is not written: {error}", err=True)
    if as_json:
        _print_object(values, run, told)
    else:
        _print(summary, run, told, verbose=verbose)
    return _exit_code(summary, run, told)


def _replay(store: FindingStore, plan: Plan, writer: HistoryWriter) -> None:
    """Check stored findings again before any case is generated."""
    from equivcheck.cli.findings.replay import check_again
    from equivcheck.cli.findings.replay_all import each_replayed

    def check(kept: Finding) -> CaseVerdict:
        return check_again(kept, kept.verdict.world, plan.deadline, confirm=False)

    for replayed in each_replayed(store, check, writer.run.torch):
        writer.replayed(replayed)


def _told(store: FindingStore, writer: HistoryWriter) -> tuple[Record, ...] | None:
    """Return findings whose status the run decided. None, with a line on stderr, if the history could not be written."""
    from equivcheck.campaign.history.history import History, HistoryFailed
    from equivcheck.campaign.history.standing import records, records_decided_by

    try:
        if writer.failed:
            raise HistoryFailed(writer.failed)
        return records_decided_by(writer.run, records(History(store.path)))
    except HistoryFailed as error:
        click.echo(f"{error}; each finding of this run counts as new", err=True)
        return None


def _print_object(values: dict[str, Any], run: Run, told: tuple[Record, ...] | None) -> None:
    from equivcheck.campaign.history.standing import fails
    from equivcheck.report.standing_text import standing_object

    standings = None if told is None else [standing_object(record, fails=fails(run, record)) for record in told]
    print_json(values | {"mode": run.mode.value, "shard": run.shard or None, "standings": standings})


def _print(summary: Summary, run: Run, told: tuple[Record, ...] | None, *, verbose: bool) -> None:
    from equivcheck.campaign.history.standing import fails
    from equivcheck.report.campaign.summary_details import print_details
    from equivcheck.report.campaign.summary_text import print_summary
    from equivcheck.report.standing_text import print_standings

    print_summary(console(width=COLUMNS), summary)
    if verbose:
        print_details(console(), summary)
    if told and (run.mode.replays or any(record.accepted for record in told)):
        print_standings(console(), told, partial(fails, run))


def _exit_code(summary: Summary, run: Run, told: tuple[Record, ...] | None) -> ExitCode:
    # A checker that failed, could not keep a finding or missed its control outweighs the findings.
    from equivcheck.campaign.history.standing import can_make_run_fail, fails

    if summary.broken:
        click.echo(f"error: the checker itself failed: {summary.broken.splitlines()[0]}", err=True)
        return ExitCode.CANNOT_RUN
    if summary.unkept:
        click.echo(f"error: {summary.unkept}; findings that are not kept are printed with their case", err=True)
        return ExitCode.CANNOT_RUN
    if summary.control is not None and summary.has_survivor:
        from equivcheck.report.campaign.summary_text import control_text

        means = "a clean result here proves nothing: the control was not caught"
        click.echo(f"error: {control_text(summary.control)} ({summary.control.wrong.rstrip('.')}); {means}", err=True)
        return ExitCode.CANNOT_RUN
    names = (finding.verdict.case.name for finding in summary.findings)
    found = any(can_make_run_fail(run, name) for name in names) if told is None else any(fails(run, record) for record in told)
    return ExitCode.FINDINGS if found else ExitCode.NOTHING_FOUND
