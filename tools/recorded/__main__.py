"""Compares recordings of right layouts with one device and with each other: `python -m tools.recorded`."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from equivcheck import Outcome, TraceVerdict, compare
from equivcheck.cli.options import console, json_option, print_json
from equivcheck.worlds.pool import ranks
from tools.recorded.layouts import LAYOUTS, NUM_PAIRED, train
from tools.recorded.runs import record_one_device, run_recorded

DTYPES = ("float64", "float32", "bfloat16")


def record_layout(name: str, dtype: str, folder: Path) -> Path:
    """Record a layout over gloo. Returns the folder."""
    ranks("gloo", LAYOUTS[name].num_ranks).run(run_recorded, folder / name, {}, train, name, dtype)
    return folder / name


def verdicts_on_layouts(names: Sequence[str], dtype: str, folder: Path) -> dict[tuple[str, str], TraceVerdict]:
    """Verdicts on all layouts against one device, then on all ordered pairs of the first `NUM_PAIRED`."""
    one, *moved = record_one_device(lambda: train(None, dtype), folder)
    recorded = {name: record_layout(name, dtype, folder) for name in names}
    found = {("one device", name): compare(one, run, moved=moved) for name, run in recorded.items()}
    for first, second in itertools.permutations(list(names)[:NUM_PAIRED], 2):
        found[first, second] = compare(recorded[first], recorded[second], moved=moved)
    return found


def summary(found: Mapping[tuple[str, str], TraceVerdict]) -> dict[str, Any]:
    """Counts, the worst error in tolerances, and the verdicts that are not EQUIVALENT."""
    rows: dict[bool, list[TraceVerdict]] = {True: [], False: []}
    for (first, _), verdict in found.items():
        rows[first == "one device"].append(verdict)
    counts = {
        f"{kind} EQUIVALENT": f"{sum(each.outcome is Outcome.EQUIVALENT for each in rows[key])} of {len(rows[key])}"
        for key, kind in ((True, "layouts"), (False, "pairs"))
    }
    worst = {
        f"largest error of {kind}": max((each.worst_error for each in rows[key]), default=0.0)
        for key, kind in ((True, "layouts"), (False, "pairs"))
    }
    others = {
        f"{first} and {second}": str(verdict)
        for (first, second), verdict in found.items()
        if verdict.outcome is not Outcome.EQUIVALENT
    }
    return counts | worst | {"others": others}


@click.command()
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Element type; repeatable.  [default: all]")
@click.option("--layout", "names", type=click.Choice(list(LAYOUTS)), multiple=True, help="Layout; repeatable.  [default: all]")
@json_option
def main(dtypes: tuple[str, ...], names: tuple[str, ...], as_json: bool) -> None:
    """Record one training under right layouts, and compare all recordings."""
    found = {}
    for dtype in dtypes or DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            found[dtype] = summary(verdicts_on_layouts(names or list(LAYOUTS), dtype, Path(folder)))
    if as_json:
        print_json(found)
        return
    table = Table("", *found, box=None, pad_edge=False, header_style="bold")
    for row in next(iter(found.values())):
        if row != "others":
            table.add_row(row, *(_shown(each[row]) for each in found.values()))
    console().print(table)
    for dtype, each in found.items():
        for pair, text in each["others"].items():
            click.echo(f"{dtype}, {pair}: {text}")


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
