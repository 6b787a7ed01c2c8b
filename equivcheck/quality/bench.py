"""How long a check takes in simulation, on kept processes, on fresh ones, and how much of it the rank programs are."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from equivcheck.campaign.batches import EndBatch, run_batch
from equivcheck.checking.check import check
from equivcheck.layouts.composition.limits import repaired, repaired_layout, unsupported
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
from equivcheck.strategies import scenarios
from equivcheck.system.choice import Choice
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.spawn import run_spawned

_SEED = 20_240
"""Draws the generated scenarios: the same ones in every run."""
_DRAWN_PER_SCENARIO = 8
"""Generated scenarios from which one is picked: the first that Hypothesis draws are the smallest."""

DEFAULT_ROWS = tuple((tag, size) for tag in ("ddp", "fsdp1", "fsdp2", "tensor_parallel", "spmd") for size in (2, 4))
"""Layout and ranks of each row."""

MEASURED = ("sim_ms", "gloo_ms", "spawn_ms", "ranks_only_ms")
DERIVED = ("speedup_over_spawn", "speedup_over_gloo", "oracle_share")
"""Figures of a row."""


class Source(Choice):
    """What is trained."""

    GENERATED = "generated"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians for one layout on so many ranks, in milliseconds for one scenario; None where nothing was measured."""

    layout: str
    """Tag of the parallelism."""
    ranks: int
    """Number of ranks."""
    scenarios: int
    """Scenarios that were measured."""
    sim_ms: float | None
    """A full check in simulation."""
    gloo_ms: float | None
    """A full check on kept processes."""
    spawn_ms: float | None
    """A full check on processes started for it."""
    ranks_only_ms: float | None
    """The rank programs alone, in simulation: no reference, no comparison."""

    @property
    def speedup_over_spawn(self) -> float | None:
        """How many times a check is faster in simulation than on fresh processes."""
        return _ratio(self.spawn_ms, self.sim_ms)

    @property
    def speedup_over_gloo(self) -> float | None:
        """How many times a check is faster in simulation than on kept processes."""
        return _ratio(self.gloo_ms, self.sim_ms)

    @property
    def oracle_share(self) -> float | None:
        """The share of a check in simulation that is not the rank programs."""
        share = _ratio(self.ranks_only_ms, self.sim_ms)
        return None if share is None else 1.0 - share


def row_object(row: Row) -> dict[str, Any]:
    """A row as JSON values."""
    figures = {name: getattr(row, name) for name in (*MEASURED, *DERIVED)}
    rounded = {name: None if value is None else round(value, 3) for name, value in figures.items()}
    return {"layout": row.layout, "ranks": row.ranks, "scenarios": row.scenarios} | rounded


class SpawnRanks(Ranks):
    """Ranks that are started for every run."""

    name: ClassVar[str] = "spawn"

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,  # noqa: ARG002
        deadline: float = 60.0,
        is_foreign: bool = True,  # noqa: ARG002
    ) -> Run:
        """Start the ranks, run, and let them exit."""
        return run_spawned(program, *arguments, size=self.size, deadline=deadline)

    def close(self) -> None:
        """Nothing is kept."""


def measure_row(tag: str, size: int, *, source: Source, num_scenarios: int, num_spawned: int) -> Row:
    """Measure a layout on `size` ranks.

    The worlds take turns on each scenario, so that a noisy machine troubles all of them. Every measured check has data that was
    not checked before, so that no reference is at hand, after a check of the same structure with other data, so that what a world
    keeps between checks is warm.
    """
    times: dict[str, list[float]] = {"sim": [], "gloo": [], "spawn": [], "ranks_only": []}
    picked = (
        fixed_scenarios(tag, size, num_scenarios) if source is Source.FIXED else generated_scenarios(tag, size, num_scenarios)
    )
    for scenario in picked:
        with_spawn = len(times["spawn"]) < num_spawned
        for name, seconds in _measure(scenario, size, with_spawn):
            times[name].append(seconds)
    return Row(
        layout=tag, ranks=size, scenarios=len(times["sim"]), **{f"{name}_ms": _median_ms(found) for name, found in times.items()}
    )


def _measure(scenario: Scenario, size: int, with_spawn: bool) -> Iterator[tuple[str, float]]:
    fresh = _with_fresh_data(scenario)
    simulated = ranks("sim", size)
    warm = [check(next(fresh), world=world).outcome for world in ("sim", "gloo")]
    if any(outcome is not Outcome.EQUIVALENT for outcome in warm):
        return
    yield "sim", _seconds(lambda: check(next(fresh), world="sim"))
    yield "gloo", _seconds(lambda: check(next(fresh), world="gloo"))
    yield "ranks_only", _seconds(lambda: simulated.run(rank_program, next(fresh)))
    if with_spawn:
        yield "spawn", _seconds(lambda: check(next(fresh), world=SpawnRanks(size)))


def _with_fresh_data(scenario: Scenario) -> Iterator[Scenario]:
    for seed in itertools.count(scenario.training.seed + 1):
        yield replace(scenario, training=replace(scenario.training, seed=seed % 2**32))


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _median_ms(times: list[float]) -> float | None:
    return round(statistics.median(times) * 1000, 3) if times else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def generated_scenarios(tag: str, size: int, num: int) -> list[Scenario]:
    """Scenarios of one layout on exactly `size` ranks, drawn from the strategies; the same in every run."""
    drawn: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        if unsupported(scenario.training, scenario.layout) is None:
            drawn.append(scenario)
        if len(drawn) >= num * _DRAWN_PER_SCENARIO:
            raise EndBatch

    of_size = scenarios(layouts=(tag,), max_ranks=size).filter(lambda scenario: scenario.layout.mesh.num_ranks == size)
    for batch in range(num):
        if len(drawn) < num * _DRAWN_PER_SCENARIO:
            run_batch(of_size, _SEED + batch, take)
    return random.Random(_SEED).sample(drawn, min(num, len(drawn)))


def fixed_scenarios(name: str, size: int, num: int) -> list[Scenario]:
    """One training with other data each time: three linears, AdamW, three steps."""
    layout = repaired_layout(_fixed_layout(name, size))
    model = Model(features=16, layers=(Layer(width=32), Layer(width=32), Layer(width=16)))
    training = Training(model=model, data=Data(microbatches=(8,)), optimizer=AdamW(), loss=Loss.MSE_SUM, steps=3)
    training = repaired(training, layout)
    return [Scenario(training=replace(training, seed=1000 * number), layout=layout) for number in range(num)]


def _fixed_layout(name: str, size: int) -> Layout:
    """A named layout with default options on `size` ranks, two of them innermost where parallelisms share four or more."""
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
        plan=(LayerPlan(split=Split.COLUMN, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROW), LayerPlan())
    )
