"""`equivcheck selftest`: measure how many planted bugs the checker catches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, print_json, seconds_option, seed_option, workers_option
from equivcheck.cli.searches.fuzz import num_cores
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from equivcheck.mutants.mutant import Mutant


def _named(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Mutant, ...]:  # noqa: ARG001
    from equivcheck.mutants.registry import mutant, mutants

    wanted = dict.fromkeys(name.strip() for part in value for name in part.split(","))
    return tuple(map(mutant, wanted)) if wanted else tuple(mutants().values())


mutants_option = click.option(
    "--mutants",
    metavar="NAME,...",
    callback=_named,
    help="Only these mutants, in this order. Repeatable.  [default: all]",
    multiple=True,
)


@click.command()
@mutants_option
@click.option(
    "--examples", type=click.IntRange(1, 500), default=200, show_default=True, help="Maximum scenarios for each mutant."
)
@seconds_option(
    "Time limit for each mutant; shrinking takes up to 20 seconds more.", 120.0, names=("--seconds-per-mutant", "seconds")
)
@seed_option("Seed of the generated scenarios.", 0)
@workers_option
@json_option
def selftest(  # noqa: PLR0913, PLR0917 - options
    mutants: tuple[Mutant, ...], examples: int, seconds: float, seed: int, workers: int | None, as_json: bool
) -> ExitCode:
    """Measure how many planted bugs the checker catches.

    Each bug (mutant) is planted into generated parallel trainings. The scenario that catches it is shrunk and diagnosed. Exit
    code 1 if a mutant never has an effect, or is never caught. Ctrl-C ends early and shows the results so far.
    """
    from equivcheck.quality.selftest.examine import Effort
    from equivcheck.quality.selftest.supervisor import selftest as examine_all
    from equivcheck.report.selftest_text import mutant_line, print_selftest, selftest_object

    found = examine_all(
        mutants,
        Effort(seed=seed, examples=examples, seconds=seconds),
        num_workers=workers or num_cores(),
        listener=lambda row, count: click.echo(f"{count}/{len(mutants)} {mutant_line(row)}", err=True),
    )
    if as_json:
        print_json(selftest_object(found))
    else:
        print_selftest(console(), found)
    return ExitCode.NOTHING_FOUND if found.is_passed else ExitCode.FINDINGS
