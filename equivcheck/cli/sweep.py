"""`equivcheck sweep`: every operation of tensor programs under every placement of its arguments."""

from __future__ import annotations

import math
import sys
import time

import click

from equivcheck.cli.options import console, json_option, print_json, world_option
from equivcheck.cli.shell import ExitCode


class _Mesh(click.ParamType[tuple[int, ...]]):
    """``2`` or ``2,3``."""

    name = "mesh"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Sizes of axes."""
        if isinstance(value, tuple):
            return value
        sizes = str(value).split(",")
        if not (1 <= len(sizes) <= 3 and all(size.isdecimal() and 1 <= int(size) <= 8 for size in sizes)):
            self.fail(f"{value!r} is no mesh; allowed: 1 to 3 sizes from 1 to 8, as 2 or 2,2", param, ctx)
        return tuple(map(int, sizes))


def _known_names(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG001
    """Refuse the name of an operation that there is not."""
    from equivcheck.tensor_program.operations.registry import OPERATIONS

    wrong = next((name for name in value if name not in OPERATIONS), None)
    if wrong is not None:
        raise click.BadParameter(f"operation {wrong!r} does not exist; allowed: {', '.join(OPERATIONS)}")
    return value


@click.command()
@click.option("--mesh", type=_Mesh(), default="2", show_default=True, help="Sizes of the axes, as 2 or 2,2.")
@click.option(
    "--operation", "operations", multiple=True, callback=_known_names, metavar="NAME", help="Only this one; may be repeated."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    help="Stop after this time; Ctrl-C stops it as well.  [default: run all]",
)
@world_option("sim")
@json_option
def sweep(mesh: tuple[int, ...], operations: tuple[str, ...], seconds: float, world: str, as_json: bool) -> ExitCode:
    """Run every operation under every placement of its arguments, and print what one device does not compute alike."""
    from equivcheck.report.sweep_text import print_sweep, sweep_object
    from equivcheck.sweep.programs import Sweep
    from equivcheck.sweep.sweep import swept
    from equivcheck.workers.supervision import Interruption

    programs, until = tuple(Sweep(mesh=mesh, operations=operations).programs()), time.monotonic() + seconds
    with Interruption() as interruption, click.progressbar(programs, label="programs", file=sys.stderr) as left:
        found = swept(left, world=world, is_over=lambda: interruption.requested or time.monotonic() > until)
    if as_json:
        print_json(sweep_object(found))
    else:
        print_sweep(console(), found)
    return ExitCode.FINDINGS if found.num_findings else ExitCode.NOTHING_FOUND
