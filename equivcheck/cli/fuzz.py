"""`equivcheck fuzz`: generated scenarios for a time."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, deadline_option, json_option, layouts_option, print_json, store_option, world_option
from equivcheck.cli.shell import ExitCode
from equivcheck.scenario.mesh import MAX_RANKS

if TYPE_CHECKING:
    from equivcheck.campaign.events import Summary
    from equivcheck.campaign.plan import Plan


@click.command()
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Time budget, from the first check on.")
@click.option(
    "--checks",
    "num_checks",
    type=click.IntRange(min=1),
    help="Checks to do, however long; the same for the same seed and workers.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the generated scenarios; random by default, always printed.")
@layouts_option
@world_option("sim")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
@click.option(
    "--max-ranks", type=click.IntRange(1, MAX_RANKS), default=MAX_RANKS, show_default=True, help="Most ranks in a scenario."
)
@deadline_option(30.0)
@store_option
@json_option
def fuzz(  # noqa: PLR0913, PLR0917 - options
    seconds: float | None,
    num_checks: int | None,
    seed: int | None,
    layouts: tuple[str, ...],
    world: str,
    workers: int | None,
    max_ranks: int,
    deadline: float,
    store: Path,
    as_json: bool,
) -> ExitCode:
    """Check generated scenarios for some time, or so many of them, shrink what fails, and keep it.

    One batch in ten is beyond limits of torch: there a run must be right, or raise on every rank.
    As a control, one known bug, chosen by the seed, is planted in some scenarios: exit code 3 if the check does not catch it.
    Ctrl-C ends the run early: findings so far are kept, and the exit code tells whether there are any.
    """
    from equivcheck.campaign.control import applicable_mutants
    from equivcheck.campaign.plan import Plan, frontier_scenarios

    if seconds is None and num_checks is None:
        raise click.UsageError("Missing option '--seconds' or '--checks'.")
    plan = Plan(
        seconds=math.inf if seconds is None else seconds,
        num_checks=num_checks,
        seed=secrets.randbits(32) if seed is None else seed,
        num_workers=workers or num_cores(),
        world=world,
        layouts=layouts,
        max_ranks=max_ranks,
        deadline=deadline,
        stuck_seconds=2 * deadline + 100.0,  # two layouts, one after the other
        frontier=frontier_scenarios,
        controls=applicable_mutants,
    )
    return run_plan(plan, store, as_json)


def run_plan(plan: Plan, store: Path, as_json: bool) -> ExitCode:
    """Run a campaign with a progress line on stderr and its summary on stdout."""
    from equivcheck.campaign.supervisor import fuzz as run_campaign
    from equivcheck.findings.store import FindingStore
    from equivcheck.report.progress import ProgressLine
    from equivcheck.report.summary_object import summary_object
    from equivcheck.report.summary_text import print_summary

    with ProgressLine(console(stderr=True)) as progress:
        summary = run_campaign(plan, FindingStore(store), [progress])
    if as_json:
        print_json(summary_object(summary))
    else:
        print_summary(console(), summary)
    return exit_code(summary)


def exit_code(summary: Summary) -> ExitCode:
    """Of a campaign: a checker that broke, could not keep a finding, or missed its control comes before what it had found."""
    if summary.broken:
        click.echo(f"error: the checker itself failed: {summary.broken.splitlines()[0]}", err=True)
        return ExitCode.CANNOT_RUN
    if summary.unkept:
        click.echo(f"error: {summary.unkept}; what is not kept is printed with its scenario", err=True)
        return ExitCode.CANNOT_RUN
    if summary.control is not None and summary.has_survivor:
        from equivcheck.report.summary_text import control_text

        told = "a clean result here proves nothing: the control was not caught"
        click.echo(f"error: {control_text(summary.control)} ({summary.control.wrong.rstrip('.')}); {told}", err=True)
        return ExitCode.CANNOT_RUN
    return ExitCode.FINDINGS if summary.findings else ExitCode.NOTHING_FOUND


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
