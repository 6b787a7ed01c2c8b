"""`equivcheck batching`: check a training step over the same examples in other batches."""

from __future__ import annotations

from pathlib import Path

import click

from equivcheck.cli.options import html_option, json_option, print_json, write_page
from equivcheck.cli.shell import ExitCode


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@json_option
@html_option
def batching(recipe: Path, as_json: bool, html: Path | None) -> ExitCode:
    """Check a training step on the same examples, batched in other ways.

    RECIPE is a Python file that defines an equivcheck.Batching. Exit code 0 if the step agrees for all batches, 1 if it differs
    or fails for one, 3 if the check is inconclusive.
    """
    from equivcheck.batching.batching import Batching
    from equivcheck.oracle.verdict.verdict import Outcome
    from equivcheck.scenario.file_format.codec import encode
    from equivcheck.user.recipe import defined_in

    found = defined_in(recipe, Batching).check()
    if as_json:
        print_json(encode(found))
    else:
        click.echo(found.describe())
    if html is not None:
        from equivcheck.report.batching_page.page import write_batching_page

        write_page(html, lambda file: write_batching_page(file, recipe.name, found))
    codes = {Outcome.EQUIVALENT: ExitCode.NOTHING_FOUND, Outcome.INCONCLUSIVE: ExitCode.CANNOT_RUN}
    return codes.get(found.outcome, ExitCode.FINDINGS)
