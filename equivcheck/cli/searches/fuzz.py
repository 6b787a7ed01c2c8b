"""`equivcheck fuzz`: search for errors with generated cases."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.campaign.history.run import FailOn, Mode, Run
from equivcheck.cli.options import (
    choice_option,
    deadline_option,
    html_option,
    json_option,
    layouts_option,
    seconds_option,
    seed_option,
    shard_option,
    store_option,
    world_option,
)
from equivcheck.cli.searches.campaigns import run_campaign
from equivcheck.cli.shell import ExitCode
from equivcheck.scenario.mesh import MAX_RANKS

if TYPE_CHECKING:
    from equivcheck.campaign.cluster.crew import ClusterWorkers
    from equivcheck.campaign.shard import Shard

_USUAL_SECONDS = {Mode.EXPLORE: 60.0, Mode.PR: 300.0, Mode.NIGHTLY: 7200.0}
"""Default time budgets in seconds, by mode."""


@click.command()
@seconds_option(
    "Time limit, counted from the first check.  [default: explore 60, pr 300, nightly 7200; plain needs --seconds or --checks]",
)
@click.option(
    "--checks",
    "num_checks",
    type=click.IntRange(min=1),
    help="Stop after this many checks. The same seed and number of workers give the same checks.",
)
@seed_option()
@choice_option("--mode", Mode.PLAIN, "Findings that lead to exit code 1 (see above).")
@choice_option("--fail-on", FailOn.ALL, "Findings that count: all, or only those in trainings.")
@shard_option("CI job I (from 1) of N. Jobs with the same --seed check different cases.")
@layouts_option
@click.option("--programs", "only_programs", is_flag=True, help="Check random DTensor programs instead of trainings.")
@click.option("--with-programs", is_flag=True, help="Check trainings and random DTensor programs, as nightly does.")
@world_option("sim")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Worker processes; with --ray, on each node.  [default: one per core]"
)
@click.option("--ray", metavar="auto|HOST:PORT", help="Check on all nodes of a Ray cluster; needs equivcheck[ray].")
@click.option(
    "--max-ranks",
    type=click.IntRange(1, MAX_RANKS),
    default=MAX_RANKS,
    show_default=True,
    help="Maximum number of ranks.",
)
@deadline_option(30.0)
@store_option
@click.option("-v", "--verbose", is_flag=True, help="Print all layouts, known issues, coverage, errors and findings.")
@json_option
@html_option
def fuzz(  # noqa: PLR0913, PLR0917 - options
    seconds: float | None,
    num_checks: int | None,
    seed: int | None,
    mode: str,
    fail_on: str,
    shard: Shard,
    layouts: tuple[str, ...],
    only_programs: bool,
    with_programs: bool,
    world: str,
    workers: int | None,
    ray: str | None,
    max_ranks: int,
    deadline: float,
    store: Path,
    verbose: bool,
    as_json: bool,
    html: Path | None,
) -> ExitCode:
    """Search for errors with generated trainings and layouts.

    Each training runs in parallel and on a single device. Every failure is shrunk and kept.

    \b
    Which findings lead to exit code 1, by --mode:
      plain    every finding
      explore  none (for a first look)
      pr       findings not yet in the store
      nightly  as pr, and findings that were fixed and fail again

    pr and nightly first check the stored findings again.

    Exit code 3 means in every mode that the checker itself failed, or missed a bug that it plants on purpose as its control.

    One check in ten uses settings that torch does not support. Such a run must be correct or fail on every rank. Findings that
    you accepted with `equivcheck triage` never lead to exit code 1. Ctrl-C ends early and keeps the findings.
    """  # noqa: D301 - click keeps the lines behind a backspace as they are
    from equivcheck.campaign.control import applicable_faults
    from equivcheck.campaign.plan import Plan, frontier_scenarios, generated_programs, generated_scenarios

    if seconds is None and num_checks is None:
        seconds = _USUAL_SECONDS.get(Mode(mode))
    if seconds is None and num_checks is None:
        raise click.UsageError("Missing option '--seconds' or '--checks'.")
    if only_programs and (layouts or with_programs):
        other = "--layout" if layouts else "--with-programs"
        raise click.UsageError(f"--programs checks no trainings, so {other} is not valid. Expected one of the two.")
    has_programs = only_programs or with_programs or (mode == Mode.NIGHTLY.value and not layouts)
    with _cluster(ray, workers) as crew:
        plan = Plan(
            seconds=math.inf if seconds is None else seconds,
            num_checks=num_checks,
            seed=shard.seed(secrets.randbits(32) if seed is None else seed),
            num_workers=crew.num_workers if crew else workers or num_cores(),
            world=world,
            layouts=layouts,
            max_ranks=max_ranks,
            deadline=deadline,
            stuck_seconds=2 * deadline + 100.0,  # two layouts, one after the other
            strategy=None if only_programs else generated_scenarios,
            frontier=None if only_programs else frontier_scenarios,
            programs=generated_programs if has_programs else None,
            controls=applicable_faults,
        )
        run = Run(seed=plan.seed, mode=Mode(mode), fail_on=FailOn(fail_on), shard=str(shard) if shard.of > 1 else "")
        return run_campaign(plan, store, run, as_json=as_json, verbose=verbose, html=html, crew=crew)


def _cluster(address: str | None, workers: int | None) -> contextlib.AbstractContextManager[ClusterWorkers | None]:
    """Return workers on a Ray cluster; None without an address."""
    if address is None:
        return contextlib.nullcontext()
    from equivcheck.campaign.cluster.crew import connect_ray

    return connect_ray(address, workers)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
