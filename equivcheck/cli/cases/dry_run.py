"""`equivcheck dry-run`: check a layout at a size that this machine cannot run."""

from __future__ import annotations

import click

from equivcheck.cli.cases.check import read_scenario
from equivcheck.cli.options import console, json_option, print_json
from equivcheck.cli.shell import ExitCode


@click.command("dry-run")
@click.argument("file", type=click.Path(path_type=str))
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Number of ranks. The outermost data axis grows to reach it.  [default: as in FILE]",
)
@json_option
def dry_run(file: str, ranks: int | None, as_json: bool) -> ExitCode:
    """Check a layout on any number of ranks, on this machine.

    FILE contains a scenario. Only the first and the last rank train, one after the other, without other ranks. Their shards and
    collective calls are compared with the expected ones, and their calls also with those of a few simulated ranks. Exit code 1 if
    they differ.
    """
    scenario = read_scenario(file)
    from equivcheck.checking.dry_run.grow import scenario_on_ranks
    from equivcheck.checking.dry_run.run import dry_run as run
    from equivcheck.report.dry_run_text import print_dry_run
    from equivcheck.scenario.file_format.codec import encode
    from equivcheck.worlds.failure import RanksFailed

    try:
        found = run(scenario if ranks is None else scenario_on_ranks(scenario, ranks))
    except RanksFailed as error:
        if as_json:
            print_json({"failure": encode(error.failure)})
        else:
            click.echo(f"the layout does not run at that size: {error}")
        return ExitCode.FINDINGS
    if as_json:
        print_json(encode(found))
    else:
        print_dry_run(console(), found)
    return ExitCode.FINDINGS if found.problems else ExitCode.NOTHING_FOUND
