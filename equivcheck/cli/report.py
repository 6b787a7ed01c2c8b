"""`equivcheck report`: one run of fuzz as a page."""

from __future__ import annotations

from pathlib import Path

import click

from equivcheck.cli.options import output_file, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.system.printable import printable

_DEFAULT_NAME = Path("equivcheck_report.html")


@click.command()
@store_option
@click.option("--run", metavar="RUN", default="", help="First digits of a run's identifier.  [default: the last run]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    callback=output_file,
    default=_DEFAULT_NAME,
    show_default=True,
    metavar="FILE",
    help="The page; a file that is there is replaced.",
)
def report(store: Path, run: str, output: Path) -> ExitCode:
    """Write an HTML page about a run of fuzz, from the history of its store: one file that needs nothing else."""
    from equivcheck.report.run_page.page import write_page

    past = write_page(output, store, run)
    click.echo(printable(f"{output}: run {past.run.id}, {past.run.mode.value}, began {past.run.began[:19]} UTC"))
    return ExitCode.NOTHING_FOUND
