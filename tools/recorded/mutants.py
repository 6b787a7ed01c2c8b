"""Records each mutant and compares it with one device: `python -m tools.recorded.mutants`."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from equivcheck import Outcome
from equivcheck.cli.options import console, json_option, print_json
from equivcheck.mutants.registry import mutant, mutants
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.trace import Moment
from equivcheck.scenario import Scenario
from tools.recorded.runs import check_both

NEVER_FINISH = (
    "rank_skips_reduction",
    "rank_reduces_once_more",
    "rank_swaps_calls",
    "counts_sent_taken_for_counts_received",
    "rank_without_experts_skips_exchange",
    "rank_raises",
)
"""Mutants whose ranks hang or crash in their first step, so a recording has nothing to compare."""
NOT_RECORDED = {
    "norm_after_clipping_returned": "the clipping function returns the right norm, and a wrapper another one",
    "state_not_restored": "a recording is about one job, without the checkpoint of an earlier one",
    "rank_skips_update": "a rank that never updates writes no step",
    "read_before_done": "between processes, the reduction may have finished in time",
    "trailing_window_not_stepped": "without an update there is no step to compare: this is INCONCLUSIVE",
    "momentum_forgotten": "in one step, only the optimizer's state differs, and one run has none: this is INCONCLUSIVE",
}
"""Mutants that a recording cannot show, with the reason."""
ALSO_RIGHT: dict[str, tuple[Cause, ...]] = {
    "clamped_before_reduction": (Cause.GRADIENT_LOST,),
    "parameters_of_last_step": (Cause.NOT_UPDATED,),
    "column_input_gradient_not_reduced": (Cause.NOT_REDUCED,),
    "adapter_gradient_not_reduced": (Cause.NOT_REDUCED,),
    "head_input_gradient_not_reduced": (Cause.NOT_REDUCED,),
    "copy_to_region_missing": (Cause.NOT_REDUCED,),
    "experts_copy_to_region_missing": (Cause.NOT_REDUCED,),
    "router_learns_from_partial_sum": (Cause.NOT_REDUCED,),
    "pipeline_copies_not_summed": (Cause.NOT_REDUCED,),
    "label_lost_at_boundaries": (Cause.GRADIENT_LOST,),
    "trailing_window_divided_as_full": (Cause.SCALED,),
    "labels_of_first_window_counted": (Cause.SCALED,),
    "sequences_averaged_over_ignored_labels": (Cause.SCALED,),
}
"""Causes that describe the recorded values of a mutant exactly, although its fault is elsewhere."""
FORWARD = (Moment.OUTPUT.value, Moment.LOSS.value)
"""First differences inside the model. Sketches are linear and the model is not, so few of these causes can be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recorded mutant."""

    name: str
    """Name."""
    outcome: str
    """Outcome of the comparison."""
    first: str
    """Moment of the first difference."""
    cause: str
    """Named cause; empty if there is none."""
    sentence: str
    """The cause in words."""
    is_right: bool
    """Whether the cause is one of the mutant's."""


def names() -> list[str]:
    """Mutants that a recording can show."""
    return [name for name in mutants() if name not in {*NEVER_FINISH, *NOT_RECORDED}]


def right_causes(name: str) -> tuple[Cause, ...]:
    """Causes that are not wrong for a mutant."""
    return (*mutant(name).causes, *ALSO_RIGHT.get(name, ()))


def minimums() -> Mapping[str, Scenario]:
    """Each mutant's smallest scenario. It is in `tests`, which only the checkout has."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    found: Mapping[str, Scenario] = importlib.import_module("mutants.minimums").MINIMUMS
    return found


def row(name: str, scenario: Scenario, folder: Path) -> Row:
    """Record a mutant and compare it."""
    verdict = check_both(scenario, folder, mutant(name).plant).recorded
    found = verdict.diagnosis
    return Row(
        name=name,
        outcome=verdict.outcome.value,
        first="" if verdict.first is None else verdict.first.moment.value,
        cause="" if found is None else found.cause.value,
        sentence="" if found is None else found.sentence,
        is_right=found is not None and found.cause in right_causes(name),
    )


def counts(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Counts over all mutants, then over those with the same first difference."""
    yield "DIVERGED", f"{sum(each.outcome == Outcome.DIVERGED.value for each in rows)} of {len(rows)}"
    yield "cause wrong", f"{sum(bool(each.cause) and not each.is_right for each in rows)} of {len(rows)}"
    yield "cause named", _named(rows)
    after = [each for each in rows if each.first not in FORWARD]
    yield "cause named, if the loss and all outputs agree before the first difference", _named(after)
    for moment in dict.fromkeys(each.first for each in rows):
        yield f"cause named, if the first difference is {moment}", _named([each for each in rows if each.first == moment])


def _named(rows: list[Row]) -> str:
    return f"{sum(each.is_right for each in rows)} of {len(rows)}"


@click.command()
@click.option("--mutant", "chosen", multiple=True, help="Mutant; repeatable.  [default: all]")
@json_option
def main(chosen: tuple[str, ...], as_json: bool) -> None:
    """Record each mutant in its smallest scenario, and count the verdicts and the causes."""
    scenarios, rows = minimums(), []
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, scenarios[name], Path(folder)))
        click.echo(f"{name}: {rows[-1].first}, {rows[-1].cause or 'no cause'} {rows[-1].sentence}", err=True)
    if as_json:
        print_json({"counts": dict(counts(rows)), "rows": [asdict(each) for each in rows]})
        return
    table = Table("", "mutants", box=None, pad_edge=False, header_style="bold")
    for line in counts(rows):
        table.add_row(*line)
    console().print(table)


if __name__ == "__main__":
    main()
