"""Times a check in simulation, on kept processes and on new processes: `python -m tools.bench`."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import click
from rich.table import Table

from equivcheck.campaign.batches import EndBatch, run_batch
from equivcheck.campaign.findings.environment import environment
from equivcheck.checking.check import check
from equivcheck.cli.options import console, json_option, layouts_option, print_json
from equivcheck.layouts.composition.limits import limit_reason, repair_layout, repair_training
from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.composition.registry import kinds_of
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import (
    ActivationSharding,
    AdamW,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.scenario.file_format.codec import encode
from equivcheck.strategies import scenarios
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.processes.spawn import run_spawned
from equivcheck.worlds.ranks import Ranks, Run

_SEED = 20_240
_DRAWN_PER_SCENARIO = 8
"""Generated scenarios for each measured one. The first scenarios from Hypothesis are the smallest, so a sample is measured."""

DEFAULT_LAYOUTS = ("ddp", "fsdp1", "fsdp2", "tensor_parallel", "spmd")
DEFAULT_SIZES = (2, 4)
_HEADINGS = (
    "ranks",
    "sim ms",
    "gloo ms",
    "spawn ms",
    "ranks only ms",
    "x faster than spawn",
    "x faster than gloo",
    "oracle share",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Median milliseconds per scenario for one layout on `ranks` ranks; None if nothing was measured."""

    layout: str
    """The parallelism's tag."""
    ranks: int
    """Rank count."""
    scenarios: int
    """Measured scenarios."""
    sim_ms: float | None
    """A full check in simulation."""
    gloo_ms: float | None
    """A full check on processes that stay alive between checks."""
    spawn_ms: float | None
    """A full check on processes started for it."""
    ranks_only_ms: float | None
    """Only the rank programs, in simulation: no reference and no comparison."""

    @property
    def speedup_over_spawn(self) -> float | None:
        """Time on new processes divided by time in simulation."""
        return _ratio(self.spawn_ms, self.sim_ms)

    @property
    def speedup_over_gloo(self) -> float | None:
        """Time on kept processes divided by time in simulation."""
        return _ratio(self.gloo_ms, self.sim_ms)

    @property
    def oracle_share(self) -> float | None:
        """Share of a simulated check outside the rank programs, 0 to 1."""
        share = _ratio(self.ranks_only_ms, self.sim_ms)
        return None if share is None else 1.0 - share

    @property
    def figures(self) -> dict[str, float | None]:
        """Milliseconds and ratios by name."""
        names = ("sim_ms", "gloo_ms", "spawn_ms", "ranks_only_ms", "speedup_over_spawn", "speedup_over_gloo", "oracle_share")
        return {name: getattr(self, name) for name in names}


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


class _SpawnedRanks(Ranks):
    """Ranks that are started for each run."""

    name: ClassVar[str] = "spawn"

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,  # noqa: ARG002
        deadline: float = 60.0,
        is_user_code: bool = True,  # noqa: ARG002
    ) -> Run:
        return run_spawned(program, *arguments, size=self.size, deadline=deadline)

    def close(self) -> None:
        """Does nothing, because no process outlives a run."""


def measure_row(tag: str, size: int, *, is_fixed: bool, num_scenarios: int, num_spawned: int) -> BenchRow:
    """Measure a layout on `size` ranks.

    The worlds take turns on each scenario, so a noisy machine affects all of them.
    """
    times: dict[str, list[float]] = {"sim": [], "gloo": [], "spawn": [], "ranks_only": []}
    for scenario in (fixed_scenarios if is_fixed else generated_scenarios)(tag, size, num_scenarios):
        for name, seconds in _measure(scenario, size, with_spawn=len(times["spawn"]) < num_spawned):
            times[name].append(seconds)
    medians = {f"{name}_ms": round(statistics.median(found) * 1000, 3) if found else None for name, found in times.items()}
    return BenchRow(layout=tag, ranks=size, scenarios=len(times["sim"]), **medians)


def _measure(scenario: Scenario, size: int, *, with_spawn: bool) -> Iterator[tuple[str, float]]:
    # Each measured check has new data, because a reference from an earlier check would make it faster. The warm-up has the same
    # structure, so whatever a world keeps between checks is there.
    seeds = itertools.count(scenario.training.seed + 1)
    fresh = (replace(scenario, training=replace(scenario.training, seed=seed % 2**32)) for seed in seeds)
    simulated = ranks("sim", size)
    warm = [check(next(fresh), world=world).outcome for world in ("sim", "gloo")]
    if any(outcome is not Outcome.EQUIVALENT for outcome in warm):
        return
    yield "sim", _seconds(lambda: check(next(fresh), world="sim"))
    yield "gloo", _seconds(lambda: check(next(fresh), world="gloo"))
    yield "ranks_only", _seconds(lambda: simulated.run(rank_program, next(fresh)))
    if with_spawn:
        yield "spawn", _seconds(lambda: check(next(fresh), world=_SpawnedRanks(size)))


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def generated_scenarios(tag: str, size: int, num: int) -> list[Scenario]:
    """Draw scenarios with one layout on exactly `size` ranks; the same ones each time."""
    drawn: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        if limit_reason(scenario.training, scenario.layout) is None:
            drawn.append(scenario)
        if len(drawn) >= num * _DRAWN_PER_SCENARIO:
            raise EndBatch

    of_size = scenarios(layouts=(tag,), max_ranks=size).filter(lambda scenario: scenario.layout.mesh.num_ranks == size)
    for batch in range(num):
        if len(drawn) < num * _DRAWN_PER_SCENARIO:
            run_batch(of_size, _SEED + batch, take)
    return random.Random(_SEED).sample(drawn, min(num, len(drawn)))


def fixed_scenarios(name: str, size: int, num: int) -> list[Scenario]:
    """Build scenarios that differ only in their data: three linear layers, AdamW, three steps."""
    layout = repair_layout(_fixed_layout(name, size))
    model = Model(features=16, layers=(Layer(width=32), Layer(width=32), Layer(width=16)))
    training = Training(model=model, data=Data(microbatches=(8,)), optimizer=AdamW(), loss=Loss.MSE_SUM, steps=3)
    training = repair_training(training, layout)
    return [Scenario(training=replace(training, seed=1000 * number), layout=layout) for number in range(num)]


def _fixed_layout(name: str, size: int) -> Layout:
    """Default options on `size` ranks; the innermost axis has two ranks if several parallelisms share four or more."""
    parallelisms = tuple(_fixed_parallelism(kind.parallelism) for kind in kinds_of(name))
    axes = [axis for parallelism in reversed(parallelisms) for axis in parallelism.axes[0]]
    sizes = [size, *(1 for _ in axes[1:])]
    if len(axes) > 1 and size > 2 and size % 2 == 0:
        sizes[0], sizes[-1] = size // 2, 2
    mesh = Mesh(axes=tuple(Axis(name=axis, size=ranks) for axis, ranks in zip(axes, sizes, strict=True)))
    return Layout(mesh=mesh, parallelisms=parallelisms)


def _fixed_parallelism(kind: type[Parallelism]) -> Parallelism:
    if kind is not TensorParallel:
        return kind()
    return TensorParallel(
        plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE), LayerPlan())
    )


@click.command()
@click.option("--scenarios", type=click.IntRange(min=1), default=20, show_default=True, help="Scenarios for each row.")
@click.option(
    "--spawned", type=click.IntRange(min=0), default=3, show_default=True, help="How many of them also run on new processes."
)
@click.option("--fixed", is_flag=True, help="Time one fixed training instead of generated ones.")
@layouts_option
@click.option(
    "--ranks", "sizes", type=click.IntRange(1, 8), multiple=True, help="Number of ranks; may be repeated.  [default: 2, 4]"
)
@json_option
def main(  # noqa: PLR0913, PLR0917 - options
    scenarios: int, spawned: int, fixed: bool, layouts: tuple[str, ...], sizes: tuple[int, ...], as_json: bool
) -> None:
    """Time checks of the same scenarios in sim, in gloo and on new processes, and the rank programs without the oracle."""
    rows = []
    for tag in layouts or DEFAULT_LAYOUTS:
        for size in sizes or DEFAULT_SIZES:
            rows.append(measure_row(tag, size, is_fixed=fixed, num_scenarios=scenarios, num_spawned=spawned))
            click.echo(f"{tag} on {size}: sim {_shown(rows[-1].sim_ms)} ms", err=True)
    if as_json:
        found = [{"layout": row.layout, "ranks": row.ranks, "scenarios": row.scenarios} | row.figures for row in rows]
        print_json({"rows": found, "training": "fixed" if fixed else "generated", "environment": encode(environment())})
        return
    table = Table("layout", box=None, pad_edge=False, header_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        *figures, share = row.figures.values()
        table.add_row(row.layout, str(row.ranks), *map(_shown, figures), "-" if share is None else f"{share:.0%}")
    console().print(table)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
