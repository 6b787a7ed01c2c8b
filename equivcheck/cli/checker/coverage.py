"""`equivcheck coverage`: measure the features reached by generated scenarios or tensor programs."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, layouts_option, output_file, print_json, seconds_option, seed_option
from equivcheck.cli.shell import ExitCode
from equivcheck.system.files import replace_text

if TYPE_CHECKING:
    from equivcheck.campaign.coverage.legality import Examples
    from equivcheck.campaign.coverage.pairs import Pairs
    from equivcheck.campaign.plan import Plan
    from equivcheck.scenario import Scenario


@click.command()
@seconds_option("Total seconds, without starting up.", required=True)
@seed_option()
@layouts_option
@click.option("--programs", is_flag=True, help="Measure tensor programs: operations, placements and DTensor rules.")
@click.option(
    "--legal",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=output_file,
    help="Also construct scenarios for pairs that were not drawn, in half of the time, and add all legal pairs to this file.",
)
@json_option
def coverage(  # noqa: PLR0913, PLR0917 - options
    seconds: float,
    seed: int | None,
    layouts: tuple[str, ...],
    programs: bool,
    legal: Path | None,
    as_json: bool,
) -> ExitCode:
    """Measure which pairs of features occur in generated cases.

    Scenarios are generated as in fuzz, but not checked. A feature is a field of a scenario with one of its values. A pair is
    legal if a supported scenario has both.
    """
    if programs:
        if layouts or legal is not None:
            raise click.UsageError("--programs is not valid with --layout or --legal. Expected only --seconds, --seed or --json.")
        return _of_programs(seconds, seed, as_json=as_json)
    from equivcheck.campaign.coverage.legality import Examples
    from equivcheck.campaign.coverage.reach import Reach
    from equivcheck.campaign.plan import Plan
    from equivcheck.report.coverage_text import MeasuredCoverage, coverage_object, print_coverage

    plan = Plan(
        seconds=seconds if legal is None else seconds / 2,
        seed=secrets.randbits(32) if seed is None else seed,
        layouts=layouts,
    )
    reach, examples = Reach(), Examples()
    if legal is not None:
        examples.add_pairs(_read_legal(legal))

    def take(scenario: Scenario) -> None:
        reach.add(scenario)
        if legal is not None:
            examples.add(scenario)

    took = _draw(plan, take)
    if legal is not None:
        write_legal(examples, legal, plan)
    measured = MeasuredCoverage(reach=reach, plan=plan, seconds=took)
    if as_json:
        print_json(coverage_object(measured))
    else:
        print_coverage(console(), measured)
    return ExitCode.NOTHING_FOUND


def _draw(plan: Plan, take: Callable[[Scenario], None]) -> float:
    """Draw scenarios with a progress bar of seconds, and call `take` with each. Returns the seconds spent."""
    from equivcheck.campaign.batches import draw

    started = time.monotonic()
    with click.progressbar(length=math.ceil(plan.seconds), label="scenarios", file=sys.stderr) as progress:

        def take_one(scenario: Scenario) -> None:
            take(scenario)
            progress.update(int(time.monotonic() - started) - progress.pos)

        return draw(plan, take_one)


def _of_programs(seconds: float, seed: int | None, *, as_json: bool) -> ExitCode:
    from equivcheck.campaign.batches import draw
    from equivcheck.campaign.coverage.programs import ProgramReach
    from equivcheck.campaign.plan import Plan, generated_programs
    from equivcheck.programs.run.overloads import overloads
    from equivcheck.report.coverage_text import print_program_coverage, program_coverage_object

    plan = Plan(seconds=seconds, seed=secrets.randbits(32) if seed is None else seed, strategy=generated_programs)
    reach = ProgramReach()
    draw(plan, reach.add)
    found = overloads()
    if as_json:
        print_json({"seed": plan.seed, **program_coverage_object(reach, found)})
    else:
        print_program_coverage(console(), reach, found, plan.seed)
    return ExitCode.NOTHING_FOUND


def write_legal(examples: Examples, file: Path, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
    """Write the table of legal feature pairs to `file`, after constructing scenarios for at most `plan.seconds`.

    A pair that was never drawn is also legal if a supported scenario with both features can be made from the drawn ones. Such
    pairs are tried in random order, because time may end before all are tried.
    """
    from equivcheck.campaign.coverage.legality import construct_pairs
    from equivcheck.campaign.coverage.pairs import format_pairs

    ends, untried = clock() + plan.seconds, examples.pairs_never_drawn()
    Random(plan.seed).shuffle(untried)
    with click.progressbar(untried, label="legal pairs", file=sys.stderr) as pairs:
        num_tried = construct_pairs(pairs, examples, has_time=lambda: clock() < ends)
    replace_text(file, format_pairs(examples.legal))
    click.echo(
        f"{examples.legal.count:,} legal pairs; {len(untried) - num_tried:,} of {len(untried):,} others not tried", err=True
    )


def _read_legal(file: Path) -> Pairs:
    """Read the pairs in `file`. There are none if the file does not exist."""
    from equivcheck.campaign.coverage.pairs import pairs_of, read_pairs

    try:
        return read_pairs(file.read_text(encoding="utf-8")) if file.exists() else pairs_of((), ())
    except (ValueError, LookupError, TypeError) as error:
        raise click.UsageError(f"{file} is not a table of legal pairs. Expected a new file, or a file to extend.") from error
