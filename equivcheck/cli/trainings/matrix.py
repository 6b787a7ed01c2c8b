"""`equivcheck matrix`: check your training under many layouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, html_option, json_option, output_file, print_json, world_option, write_page
from equivcheck.cli.searches.fuzz import num_cores
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from equivcheck.user.matrix.result import MatrixResult
    from equivcheck.user.matrix.row import LayoutRow


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--layout", "layouts", multiple=True, metavar="NAME", help="Only this layout of the recipe. Repeatable.")
@world_option(None, "How ranks run.  [default: as in the recipe]")
@click.option("-n", "--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
@click.option("-v", "--verbose", is_flag=True, help="Print whole stacks of ranks that failed.")
@json_option
@click.option("--junit", type=click.Path(path_type=Path), callback=output_file, metavar="FILE", help="Also write JUnit XML.")
@html_option
def matrix(  # noqa: PLR0913, PLR0917 - options
    recipe: Path,
    layouts: tuple[str, ...],
    world: str | None,
    workers: int | None,
    verbose: bool,
    as_json: bool,
    junit: Path | None,
    html: Path | None,
) -> ExitCode:
    """Check your training under many layouts.

    RECIPE is a Python file that defines an equivcheck.Matrix. Exit code 1 if an outcome is not the expected one (EQUIVALENT,
    unless the recipe says otherwise), 2 if a layout cannot be checked. Ctrl-C ends early and shows the layouts checked so far.
    """
    from equivcheck.user.matrix.supervisor import check_recipe
    from equivcheck.user.matrix.worker import Order

    order = Order(recipe=recipe, world=world)
    found = check_recipe(order, layouts, num_workers=workers or num_cores(), listener=print_row)
    print_found(found, as_json=as_json, verbose=verbose)
    if junit is not None:
        from equivcheck.report.matrix.outputs import write_junit

        write_junit(junit, recipe.name, found)
    if html is not None:
        from equivcheck.report.matrix.outputs import write_html

        write_page(html, lambda file: write_html(file, recipe.name, found))
    return exit_code_of(found)


def print_row(row: LayoutRow, number: int) -> None:
    """Print one line on stderr for a checked layout. `number` is its position among all layouts."""
    from equivcheck.user.matrix.text import row_line

    click.echo(f"{number} {row_line(row)}", err=True)


def print_found(found: MatrixResult, *, as_json: bool, verbose: bool = False) -> None:
    """Print all rows of a matrix, as JSON or as a table. Unexpected verdicts are printed below it."""
    if as_json:
        from equivcheck.report.matrix.outputs import matrix_object

        print_json(matrix_object(found))
    else:
        from equivcheck.system.printable import screen_width
        from equivcheck.user.matrix.result import print_matrix

        print_matrix(console(width=screen_width()), found, verbose=verbose)


def exit_code_of(found: MatrixResult) -> ExitCode:
    """Return the exit code for a matrix. If a layout could not be checked, print the first such error on stderr."""
    for row in found.rows:
        if row.verdict is None:
            click.echo(f"error: layout {row.name!r} was not checked: {row.first_difference}", err=True)
            return ExitCode.USAGE
    return ExitCode.NOTHING_FOUND if found.is_passed else ExitCode.FINDINGS
