"""`equivcheck sweep`: run each DTensor operation with each placement of its arguments."""

from __future__ import annotations

import math
import sys
import time
from itertools import takewhile
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, print_json, seconds_option, seed_option, shard_option, world_option
from equivcheck.cli.shell import ExitCode
from equivcheck.errors import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from equivcheck.campaign.shard import Shard
    from equivcheck.programs.sweep.order import Passes
    from equivcheck.programs.sweep.pairs import Pairs
    from equivcheck.programs.sweep.programs import Sweep


class _Mesh(click.ParamType[tuple[int, ...]]):
    """Mesh sizes such as ``2`` or ``2,3``."""

    name = "mesh"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Convert text such as ``2,2`` to one to three axis sizes from 1 to 8. Other text is a usage error."""
        if isinstance(value, tuple):
            return value
        sizes = str(value).split(",")
        if not (1 <= len(sizes) <= 3 and all(size.isdecimal() and 1 <= int(size) <= 8 for size in sizes)):
            self.fail(f"mesh {value!r} is not valid. Expected 1 to 3 sizes from 1 to 8, for example 2,2", param, ctx)
        return tuple(map(int, sizes))


def _known_names(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG001
    from equivcheck.programs.nouns.operations.registry import OPERATIONS

    wrong = next((name for name in value if name not in OPERATIONS), None)
    if wrong is not None:
        raise click.BadParameter(str(unknown_name("operation", wrong, OPERATIONS)))
    return value


def _pairs(sweep: Sweep, operations: tuple[str, ...], seed: int, world: str, is_over: Callable[[], bool]) -> Pairs:
    """Return pairs of operations. All first operations run for their results, until the time is over."""
    from equivcheck.programs.sweep.pairs import Pairs
    from equivcheck.programs.sweep.results import first_programs, results_on
    from equivcheck.programs.sweep.second_programs import argument_positions
    from equivcheck.worlds.pool import ranks

    programs = tuple(first_programs(sweep, seed))
    with click.progressbar(programs, label="first operations", file=sys.stderr) as left:
        found = results_on(ranks(world, math.prod(sweep.mesh)), takewhile(lambda _: not is_over(), left))
        return Pairs(results=tuple(found), places=argument_positions(operations), seed=seed, world=world)


@click.command()
@click.option("--mesh", type=_Mesh(), default="2", show_default=True, help="Sizes of the mesh axes, for example 2,2.")
@click.option(
    "--operation", "operations", multiple=True, callback=_known_names, metavar="NAME", help="Only this operation. Repeatable."
)
@click.option("--pairs", "as_pairs", is_flag=True, help="Run each operation on results of other operations.")
@seed_option("Seed for order and arguments of --pairs.", 0)
@shard_option("Run part I (from 1) of N. With --pairs, the second operations are divided.")
@seconds_option("Stop after this time.  [default: run all]")
@world_option("sim")
@json_option
def sweep(  # noqa: PLR0913, PLR0917 - options
    mesh: tuple[int, ...],
    operations: tuple[str, ...],
    as_pairs: bool,
    seed: int,
    shard: Shard,
    seconds: float | None,
    world: str,
    as_json: bool,
) -> ExitCode:
    """Run each DTensor operation with each placement.

    Prints results that differ from a single device. Programs that cover further placements run first, so a short --seconds covers
    most placements. Use --shard to divide the programs among jobs. Ctrl-C ends early.

    With --pairs, each program has two operations, and the result of the first is an argument of the second. Programs with new
    placements and dtypes run first, then those with other strides and shard sizes. --operation then names the second operation.
    """
    from equivcheck.programs.nouns.operations.registry import OPERATIONS
    from equivcheck.programs.sweep.order import order_in_passes
    from equivcheck.programs.sweep.programs import Sweep
    from equivcheck.programs.sweep.sweep import run_sweep
    from equivcheck.report.sweep_text import print_sweep, sweep_object
    from equivcheck.worlds.workers.supervision import Interruption

    until = time.monotonic() + (math.inf if seconds is None else seconds)
    with Interruption() as interruption:

        def is_over() -> bool:
            return interruption.requested or time.monotonic() > until

        programs: Passes | Pairs
        if as_pairs:
            names = (operations or tuple(OPERATIONS))[shard.number - 1 :: shard.of]
            programs = _pairs(Sweep(mesh=mesh), names, seed, world, is_over)
        else:
            programs = order_in_passes(Sweep(mesh=mesh, operations=operations).programs()).shard(shard.number, shard.of)
        with click.progressbar(programs, label="programs", file=sys.stderr) as left:
            found = run_sweep(left, world=world, is_over=is_over, only_sinks=as_pairs)
    if as_json:
        print_json(sweep_object(found, programs.coverage()))
    else:
        print_sweep(console(), found, programs.coverage())
    return ExitCode.FINDINGS if found.num_findings else ExitCode.NOTHING_FOUND
