"""A dry run: single ranks in a large world build the layout and train; their shards and calls are counted."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from equivcheck.checking.dry_run.grow import small_scenario
from equivcheck.errors import UsageError
from equivcheck.layouts.base.expected_calls.communication import Traffic, traffic
from equivcheck.layouts.base.partition import local_shape
from equivcheck.layouts.composition.expected_calls import predict_calls
from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.parallelisms.fsdp1.flat_layout import alignment_of, held_of
from equivcheck.oracle.comparison.communication import differing_calls
from equivcheck.scenario import FSDP1, Pipeline, Scenario, ShardingStrategy, Wrapping
from equivcheck.scenario.mesh import DP, SHARD
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.worlds.call import Call
from equivcheck.worlds.fake.ranks import FakeRanks
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.ranks import Run
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Piece, Snapshot, Trace

MAX_STEPS = 2
"""Steps to run. The first step creates optimizer state and buckets. The second step is like all later steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Shape and size of one parameter's shard on one rank."""

    name: str
    """The parameter's name in the model without wrappers."""
    shape: tuple[int, ...]
    """The parameter's full shape."""
    local_shape: tuple[int, ...]
    """The shard's shape. If it lies in a flat parameter, its number of elements."""
    num_bytes: int
    """The shard's size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Predicted memory and collective calls of one rank."""

    rank: int
    """Global rank, from 0."""
    coordinates: tuple[int, ...]
    """The rank's index along each mesh axis."""
    holdings: tuple[Holding, ...]
    """The parameter shards on this rank."""
    parameter_bytes: int
    """Size of all these shards in bytes. Gradients have the same size."""
    optimizer_bytes: int
    """Size of the optimizer state in bytes."""
    traffic: tuple[Traffic, ...]
    """Collective calls in the setup and in each step. Calls that only read results for the comparison are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Result of `dry_run`: predicted memory and collective calls, and the problems found."""

    scenario: Scenario
    """The scenario on the requested number of ranks."""
    small: Scenario
    """The scenario on a few ranks, all of which ran for comparison."""
    plans: tuple[RankPlan, ...]
    """Memory and collective calls for the first and the last rank."""
    problems: tuple[str, ...]
    """Shards that differ from computed ones, and unexpected collective calls. Empty if the layout is correct.

    If calls cannot be predicted, numbers of calls that differ from the small scenario are problems, too.
    """
    remarks: tuple[str, ...]
    """Numbers of collective calls that differ from the small scenario's, but match the prediction."""
    unmodelled: str
    """Reason why collective calls cannot be predicted. Empty if they can."""
    seconds: float
    """Duration in seconds."""


def dry_run(scenario: Scenario) -> DryRun:
    """Train only the first and the last rank in a scenario, each without any other rank running.

    For comparison, the same training also runs on all ranks in a small mesh. Raises `UsageError` if the layout cannot run the
    training, or if a rank needs the others, as in pipelines. Raises `RanksFailed` if a rank raises.
    """
    started = time.perf_counter()
    if scenario.layout.has(Pipeline):
        raise UsageError(
            "dry-run: pipelines are not supported: a rank would wait for other stages. Expected a layout without a pipeline"
        )
    scenario = replace(scenario, training=replace(scenario.training, steps=min(scenario.training.steps, MAX_STEPS)))
    small = small_scenario(scenario)
    for one in (scenario, small):
        reason = limit_reason(one.training, one.layout)
        if reason is not None:
            raise UsageError(f"{one.layout.name} on {one.layout.mesh.num_ranks} ranks cannot run the training: {reason}")
    last = scenario.layout.mesh.num_ranks - 1
    found = [_run(scenario, rank) for rank in sorted({0, last})]
    misplaced = [problem for plan, run in found for problem in _misplaced(scenario, plan, run.values[0])]
    plans = tuple(plan for plan, _ in found)
    fewer = tuple(_differing(plans[0].traffic, _small_traffic(small), small.layout.mesh.num_ranks))
    prediction = predict_calls(scenario.training, scenario.layout)
    unmodelled, runs = prediction.unmodelled, () if prediction.reason else found
    surprises = [text for plan, run in runs for text in _unpredicted(scenario, plan.rank, run.calls[0])]
    return DryRun(
        scenario=scenario,
        small=small,
        plans=plans,
        problems=(*misplaced, *surprises, *(fewer if unmodelled else ())),
        remarks=() if unmodelled else fewer,
        unmodelled=unmodelled,
        seconds=time.perf_counter() - started,
    )


def _run(scenario: Scenario, rank: int) -> tuple[RankPlan, Run]:
    mesh = scenario.layout.mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = FakeRanks(mesh.num_ranks, rank).run(rank_program, scenario)
    trace: Trace = run.values[0]
    parameters = trace.steps[-1].parameters
    plan = RankPlan(
        rank=rank,
        coordinates=mesh.coordinate(rank),
        holdings=tuple(_holdings(parameters)),
        parameter_bytes=_num_bytes(parameters),
        optimizer_bytes=_num_bytes(trace.state),
        traffic=_without_reading(traffic(run.calls[0], mesh)),
    )
    return plan, run


def _holdings(snapshot: Snapshot) -> Iterator[Holding]:
    for piece, dtype in zip(snapshot.pieces, snapshot.dtypes, strict=True):
        if piece.name:
            num_bytes = piece.numel * _itemsize(dtype)
            yield Holding(name=piece.name, shape=piece.shape, local_shape=_extent(piece), num_bytes=num_bytes)


def _num_bytes(snapshot: Snapshot) -> int:
    pairs = zip(snapshot.pieces, snapshot.dtypes, strict=True)
    return sum(piece.numel * _itemsize(dtype) for piece, dtype in pairs)


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize) if dtype else 0


def _without_reading(found: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    return tuple(entry for entry in found if entry.stage is not Stage.READING)


def _small_traffic(small: Scenario) -> tuple[Traffic, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = ranks("sim", small.layout.mesh.num_ranks).run(rank_program, small)
    return _without_reading(traffic(run.calls[0], small.layout.mesh))


def _misplaced(scenario: Scenario, plan: RankPlan, trace: Trace) -> Iterator[str]:
    snapshot = trace.steps[-1].parameters
    layout = scenario.layout
    for piece, fits in zip(snapshot.pieces, snapshot.fits, strict=True):
        if not fits:
            yield f"rank {plan.rank} holds {piece.name} in another size than the expected {list(_extent(piece))}"
    flat = next(iter(layout.of(FSDP1)), None)
    if flat is not None:
        yield from _misheld(scenario, flat, plan, [piece for piece in snapshot.pieces if piece.name])
        return
    coordinates = dict(zip(layout.mesh.names, plan.coordinates, strict=True))
    parameters = {parameter.full_name: parameter for parameter in parameters_of(scenario.training.model)}
    for holding in plan.holdings:
        expected = local_shape(layout, parameters[holding.name], coordinates)
        if holding.local_shape != expected:
            yield f"rank {plan.rank} holds {list(holding.local_shape)} of {holding.name}, expected {list(expected)}"


def _misheld(scenario: Scenario, flat: FSDP1, plan: RankPlan, pieces: list[Piece]) -> Iterator[str]:
    """Describe flat parameter shards with an unexpected size. Another parallelism may shard the flattened parameters too."""
    mesh, is_sharded = scenario.layout.mesh, flat.strategy is not ShardingStrategy.NO_SHARD
    num_shards = mesh.size(DP, SHARD) if is_sharded else 1
    shard = plan.coordinates[mesh.names.index(scenario.layout.axes_of(flat)[-1])] if is_sharded else 0
    for unit in _units(flat, pieces):
        whole = [math.prod(piece.size if piece.start else piece.shape) for piece in unit]
        expected = held_of(whole, alignment_of(scenario.training, flat), num_shards, shard)
        for piece, numel in zip(unit, expected, strict=True):
            if piece.numel != numel:
                yield f"rank {plan.rank} holds {piece.numel:,} elements of {piece.name}, expected {numel:,}"


def _units(flat: FSDP1, pieces: list[Piece]) -> list[list[Piece]]:
    """Group pieces by flat parameter. A parameter's name begins with ``layers.`` and its layer index."""
    if flat.wrapping is Wrapping.ROOT_ONLY:
        return [pieces]
    return [list(unit) for _, unit in groupby(pieces, key=lambda piece: piece.name.split(".")[1])]


def _extent(piece: Piece) -> tuple[int, ...]:
    if piece.run is not None:
        return (piece.run[1],)
    return piece.size if piece.start else piece.shape


def _unpredicted(scenario: Scenario, rank: int, calls: Iterable[Call]) -> Iterator[str]:
    for (step, stage, op, axes), found in differing_calls(scenario, rank, calls).items():
        where = f"rank {rank}, step {step} {stage.value}, {op} over {axes or 'one rank'}"
        yield f"{where}: {found.actual}, expected {found.expected}"


def _differing(found: tuple[Traffic, ...], expected: tuple[Traffic, ...], num_ranks: int) -> Iterator[str]:
    """Describe calls whose number differs from the small world."""
    counts = [{(entry.step, entry.stage, entry.op, entry.axes): entry.num_calls for entry in side} for side in (found, expected)]
    for key in dict.fromkeys([*counts[0], *counts[1]]):
        here, there = (side.get(key, 0) for side in counts)
        if here != there:
            step, stage, op, axes = key
            when = "setup" if stage is Stage.SETUP else f"step {step} {stage.value}"
            yield f"{when}: {here} x {op} over {axes or 'one rank'}, but {there} on {num_ranks} ranks"
