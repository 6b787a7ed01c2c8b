"""`equivcheck compare`: find the first value that differs between two recorded runs."""

from __future__ import annotations

from pathlib import Path

import click

from equivcheck.cli.options import html_option, json_option, print_json, write_page
from equivcheck.cli.shell import ExitCode


@click.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option(
    "--moved",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="A run like ONE, recorded with --moved. Repeatable.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Compare the first N steps only.  [default: all]", metavar="N")
@click.option(
    "--names",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='TOML file that maps names in ONE to names in OTHER: "new.*.weight" = "old.*.weight".',
)
@json_option
@html_option
def compare(  # noqa: PLR0913, PLR0917 - one for each option
    one: Path,
    other: Path,
    moved: tuple[Path, ...],
    steps: int | None,
    names: Path | None,
    as_json: bool,
    html: Path | None,
) -> ExitCode:
    """Compare two recorded runs of a training.

    ONE and OTHER are folders from `equivcheck record`. The runs may have different layouts and numbers of ranks. The verdict
    calls them A and B. Exit code 0 if they are equivalent, 1 if they diverge, 3 if that cannot be decided.
    """
    from equivcheck.oracle.verdict.verdict import Outcome
    from equivcheck.recording.adapters.names import load_names
    from equivcheck.recording.compare.compare import compare_everything
    from equivcheck.scenario.file_format.codec import encode

    own_names = None if names is None else load_names(names)
    compared = compare_everything(one, other, moved=moved, steps=steps, names=own_names)
    found = compared.verdict
    if as_json:
        print_json(encode(found))
    else:
        click.echo(found.describe())
    if html is not None:
        from equivcheck.report.recording_page.page import write_page as write_recording_page

        write_page(html, lambda file: write_recording_page(file, compared))
    codes = {Outcome.EQUIVALENT: ExitCode.NOTHING_FOUND, Outcome.DIVERGED: ExitCode.FINDINGS}
    return codes.get(found.outcome, ExitCode.CANNOT_RUN)
