"""`equivcheck bench`: milliseconds per check, world by world."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import console, html_option, json_option, layouts_option, print_json, write_page
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from equivcheck.quality.bench import Row


@click.command()
@click.option("--scenarios", type=click.IntRange(min=1), default=20, show_default=True, help="Scenarios for each row.")
@click.option(
    "--spawned",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How many of them also run on new processes.",
)
@click.option(
    "--training", type=click.Choice(["generated", "fixed"]), default="generated", show_default=True, help="What is trained."
)
@layouts_option
@click.option(
    "--ranks", "sizes", type=click.IntRange(1, 8), multiple=True, help="Only this many ranks; may be repeated.  [default: 2, 4]"
)
@json_option
@html_option
def bench(  # noqa: PLR0913, PLR0917 - options
    scenarios: int,
    spawned: int,
    training: str,
    layouts: tuple[str, ...],
    sizes: tuple[int, ...],
    as_json: bool,
    html: Path | None,
) -> ExitCode:
    """Time checks of the same scenarios in sim, in gloo and on new processes, and the ranks' trainings alone."""
    from equivcheck.campaign.findings.environment import environment
    from equivcheck.quality.bench import DEFAULT_ROWS, Source, measure_row, row_object
    from equivcheck.report.pages import bench as page
    from equivcheck.scenario.file_format.codec import encode

    rows = []
    for tag in layouts or tuple(dict.fromkeys(tag for tag, _ in DEFAULT_ROWS)):
        for size in sizes or tuple(dict.fromkeys(size for _, size in DEFAULT_ROWS)):
            rows.append(measure_row(tag, size, source=Source(training), num_scenarios=scenarios, num_spawned=spawned))
            click.echo(f"{tag} on {size}: {_figures(rows[-1])}", err=True)
    told = {"rows": [row_object(row) for row in rows], "training": training, "environment": encode(environment())}
    if as_json:
        print_json(told)
    else:
        console().print(_table(rows))
    write_page(html, lambda file: page.write_page(file, told))
    return ExitCode.NOTHING_FOUND


def _figures(row: Row) -> str:
    from equivcheck.quality.bench import MEASURED

    return ", ".join(f"{name.removesuffix('_ms')} {_shown(getattr(row, name))} ms" for name in MEASURED)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: list[Row]) -> Table:
    from rich.table import Table

    from equivcheck.quality.bench import DERIVED, MEASURED

    table = Table("layout", box=None, pad_edge=False, header_style="bold")
    for heading in (
        "ranks",
        "sim ms",
        "gloo ms",
        "spawn ms",
        "ranks only ms",
        "x faster than spawn",
        "x faster than gloo",
        "oracle share",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        share = "-" if row.oracle_share is None else f"{row.oracle_share:.0%}"
        figures = [_shown(getattr(row, name)) for name in (*MEASURED, *DERIVED[:2])]
        table.add_row(row.layout, str(row.ranks), *figures, share)
    return table
