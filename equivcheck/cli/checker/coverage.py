"""`equivcheck coverage`: measure the features reached by generated scenarios or tensor programs."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, json_option, layouts_option, output_file, print_json, seconds_option, seed_option
from equivcheck.cli.shell import ExitCode
from equivcheck.system.files import replace_text

if TYPE_CHECKING:
    from equivcheck.campaign.coverage.legality import Examples


@click.command()
@seconds_option("Seconds of generation.", required=True)
@seed_option()
@layouts_option
@click.option("--programs", is_flag=True, help="Measure tensor programs: operations, placements and DTensor rules.")
@click.option(
    "--legal",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=output_file,
    help="Also construct scenarios for the other pairs, and write all legal pairs to this file; takes minutes.",
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
    from equivcheck.campaign.batches import draw
    from equivcheck.campaign.coverage.legality import Examples
    from equivcheck.campaign.coverage.reach import Reach
    from equivcheck.campaign.plan import Plan
    from equivcheck.report.coverage_text import MeasuredCoverage, coverage_object, print_coverage
    from equivcheck.scenario import Scenario

    plan = Plan(seconds=seconds, seed=secrets.randbits(32) if seed is None else seed, layouts=layouts)
    reach, examples = Reach(), Examples()

    def take(scenario: Scenario) -> None:
        reach.add(scenario)
        if legal is not None:
            examples.add(scenario)

    took = draw(plan, take)
    if legal is not None:
        write_legal(examples, legal)
    measured = MeasuredCoverage(reach=reach, plan=plan, seconds=took)
    if as_json:
        print_json(coverage_object(measured))
    else:
        print_coverage(console(), measured)
    return ExitCode.NOTHING_FOUND


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


def write_legal(examples: Examples, file: Path) -> None:
    """Write the table of legal feature pairs to `file`.

    A pair that was never drawn is also legal if a supported scenario with both features can be made from the drawn ones.
    """
    from equivcheck.campaign.coverage.legality import witness
    from equivcheck.campaign.coverage.pairs import format_pairs

    with click.progressbar(examples.pairs_never_drawn(), label="legal pairs", file=sys.stderr) as pairs:
        for one, other in pairs:
            scenario = None if examples.came_together(one, other) else witness(one, other, examples)
            if scenario is not None:
                examples.add(scenario)
    replace_text(file, format_pairs(examples.legal))
