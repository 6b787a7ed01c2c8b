"""`equivcheck bench`: milliseconds per check, world by world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.options import console, json_option, layouts_option, print_json
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from equivcheck.bench import Row

_MEASURED = ("sim_ms", "gloo_ms", "spawn_ms", "ranks_only_ms")
_DERIVED = ("speedup_over_spawn", "speedup_over_gloo", "oracle_share")


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
def bench(  # noqa: PLR0913, PLR0917 - options
    scenarios: int, spawned: int, training: str, layouts: tuple[str, ...], sizes: tuple[int, ...], as_json: bool
) -> ExitCode:
    """Time checks of the same scenarios in sim, in gloo and on new processes, and the ranks' trainings alone."""
    from equivcheck.bench import DEFAULT_ROWS, Source, measure_row
    from equivcheck.findings.environment import environment
    from equivcheck.scenario.file_format.codec import encode

    rows = []
    for tag in layouts or tuple(dict.fromkeys(tag for tag, _ in DEFAULT_ROWS)):
        for size in sizes or tuple(dict.fromkeys(size for _, size in DEFAULT_ROWS)):
            rows.append(measure_row(tag, size, source=Source(training), num_scenarios=scenarios, num_spawned=spawned))
            click.echo(f"{tag} on {size}: {_figures(rows[-1])}", err=True)
    if as_json:
        print_json({"rows": [_object(row) for row in rows], "training": training, "environment": encode(environment())})
    else:
        console().print(_table(rows))
    return ExitCode.NOTHING_FOUND


def _object(row: Row) -> dict[str, Any]:
    figures = {name: getattr(row, name) for name in (*_MEASURED, *_DERIVED)}
    rounded = {name: None if value is None else round(value, 3) for name, value in figures.items()}
    return {"layout": row.layout, "ranks": row.ranks, "scenarios": row.scenarios} | rounded


def _figures(row: Row) -> str:
    return ", ".join(f"{name.removesuffix('_ms')} {_shown(getattr(row, name))} ms" for name in _MEASURED)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: list[Row]) -> Table:
    from rich.table import Table

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
        figures = [_shown(getattr(row, name)) for name in (*_MEASURED, *_DERIVED[:2])]
        table.add_row(row.layout, str(row.ranks), *figures, share)
    return table
