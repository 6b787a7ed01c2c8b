"""`equivcheck fuzz`: generated cases for a time."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.campaigns import run_campaign
from equivcheck.cli.options import deadline_option, html_option, json_option, layouts_option, store_option, world_option
from equivcheck.cli.shell import ExitCode
from equivcheck.history.run import Mode, Run
from equivcheck.scenario.mesh import MAX_RANKS

if TYPE_CHECKING:
    from equivcheck.campaign.shard import Shard
    from equivcheck.cluster.crew import ClusterCrew

_USUAL_SECONDS = {Mode.PR: 300.0, Mode.NIGHTLY: 7200.0}
"""The budget of a mode where none is given."""


def _shard(context: click.Context, parameter: click.Parameter, value: str) -> Shard:  # noqa: ARG001
    from equivcheck.campaign.shard import shard_of
    from equivcheck.errors import UsageError

    try:
        return shard_of(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Time budget, from the first check on.  [default: 300 with --mode pr, 7200 with nightly]",
)
@click.option(
    "--checks",
    "num_checks",
    type=click.IntRange(min=1),
    help="Checks to do, however long; the same for the same seed and workers.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of what is generated; random by default, always printed.")
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in Mode]),
    default=Mode.PLAIN.value,
    show_default=True,
    help="pr and nightly replay the store first, and fail only on what is new (nightly: or back again).",
)
@click.option(
    "--shard", metavar="I/N", default="1/1", callback=_shard, help="Part I of N, each with scenarios of its own (for one --seed)."
)
@layouts_option
@click.option("--programs", "programs_alone", is_flag=True, help="Tensor programs alone, and no trainings.")
@world_option("sim")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes, on each node with --ray.  [default: one per core]")
@click.option("--ray", metavar="auto|HOST:PORT", help="Check on all nodes of a Ray cluster; needs equivcheck[ray].")
@click.option(
    "--max-ranks",
    type=click.IntRange(1, MAX_RANKS),
    default=MAX_RANKS,
    show_default=True,
    help="Most ranks in a scenario or a program.",
)
@deadline_option(30.0)
@store_option
@json_option
@html_option
def fuzz(  # noqa: PLR0913, PLR0917 - options
    seconds: float | None,
    num_checks: int | None,
    seed: int | None,
    mode: str,
    shard: Shard,
    layouts: tuple[str, ...],
    programs_alone: bool,
    world: str,
    workers: int | None,
    ray: str | None,
    max_ranks: int,
    deadline: float,
    store: Path,
    as_json: bool,
    html: Path | None,
) -> ExitCode:
    """Check generated scenarios for some time, or so many of them, shrink what fails, and keep it.

    Without --layout, tensor programs have a share of the time: a tenth to a half, by what they reach for the first time.
    One batch of scenarios in ten is beyond limits of torch: there a run must be right, or raise on every rank.
    As a control, one known bug, chosen by the seed, is planted in some of them: exit code 3 if the check does not catch it.
    Every run is entered in the store's history, and a finding that `triage` has accepted does not count.
    Ctrl-C ends the run early: findings so far are kept, and the exit code tells whether there are any.
    """
    from equivcheck.campaign.control import applicable_faults
    from equivcheck.campaign.plan import Plan, frontier_scenarios, generated_programs, generated_scenarios

    if seconds is None and num_checks is None:
        seconds = _USUAL_SECONDS.get(Mode(mode))
    if seconds is None and num_checks is None:
        raise click.UsageError("Missing option '--seconds' or '--checks'.")
    if programs_alone and layouts:
        raise click.UsageError("--programs has no layouts; allowed: --programs, or --layout.")
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
            strategy=None if programs_alone else generated_scenarios,
            frontier=None if programs_alone else frontier_scenarios,
            programs=None if layouts else generated_programs,
            controls=applicable_faults,
        )
        run = Run(seed=plan.seed, mode=Mode(mode), shard=str(shard) if shard.of > 1 else "")
        return run_campaign(plan, store, run, as_json=as_json, html=html, crew=crew)


def _cluster(address: str | None, workers: int | None) -> contextlib.AbstractContextManager[ClusterCrew | None]:
    """The nodes that do the work; none for this machine."""
    if address is None:
        return contextlib.nullcontext()
    from equivcheck.cluster.connect import connect_ray

    return connect_ray(address, workers)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
