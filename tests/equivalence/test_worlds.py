"""The property of worlds: what ranks compute does not depend on whether they are threads or processes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, event, example, given, settings

from equivcheck import Scenario
from equivcheck.layouts.composition.program import rank_program
from equivcheck.oracle.reference.reference import Reference, ReferenceRun
from equivcheck.scenario import Axis, Compression, Data, Layer, Layout, Mesh, Model, Replicate, Training
from equivcheck.strategies import scenarios
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import moments
from equivcheck.worlds.trace.tensors import Numbers, Table, Vector, norms
from equivcheck.worlds.trace.trace import Snapshot, Trace

EXAMPLES = max(6, settings().max_examples // 16)
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def left_in(world: str, scenario: Scenario) -> tuple[Trace, ...] | None:
    """The traces of all ranks; None if a rank failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kept = ranks(world, scenario.layout.mesh.num_ranks)
            return kept.run(rank_program, scenario, schedule_seed=scenario.schedule_seed, deadline=20.0).values
        except RanksFailed:
            return None


def structure(trace: Trace) -> list[object]:
    """Everything but the numbers: which piece of which tensor, of what type, was there when."""
    return [
        (moment.step, moment.phase, moment.snapshot.pieces, moment.snapshot.present, moment.snapshot.fits, moment.snapshot.dtypes)
        for moment in moments(trace)
    ]


def numbers(traces: Sequence[Trace]) -> list[bytes]:
    """Every bit of every number of every rank."""
    return [moment.snapshot.values.tobytes() for trace in traces for moment in moments(trace)]


def excess(reference: Reference, one: Sequence[Trace], other: Sequence[Trace]) -> float:
    """The largest distance of a tensor between two worlds, rank by rank, in units of the reference's tolerance."""
    worst = 0.0
    for expected, ours, theirs in zip(reference.moments, _by_moment(one), _by_moment(other), strict=True):
        for snapshot, values in zip(ours, theirs, strict=True):
            distance = norms(expected.table, _distance(expected.table, snapshot, values.values))
            beyond = distance > 0.0
            worst = max(worst, float((distance[beyond] / expected.tolerances[beyond]).max(initial=0.0)))
    return worst


def _by_moment(traces: Sequence[Trace]) -> list[list[Snapshot]]:
    """For each moment the snapshots of all ranks; of losses the mean of those that have one, as ranks average them."""
    found = []
    for of_ranks in zip(*map(moments, traces), strict=True):
        snapshots = [moment.snapshot for moment in of_ranks]
        if of_ranks[0].phase is Phase.LOSS:
            losses = [snapshot for snapshot in snapshots if snapshot.present[0]]
            snapshots = [replace(losses[0], values=np.mean([snapshot.values for snapshot in losses], axis=0))]
        found.append(snapshots)
    return found


def _distance(table: Table, snapshot: Snapshot, values: Numbers) -> Vector:
    """How far each element of a rank is from its twin, where it lies in the flat vector; infinite where only one is NaN."""
    gaps = np.where(np.isnan(snapshot.values) & np.isnan(values), 0.0, snapshot.values.astype(np.float64) - values)
    gaps = np.where(np.isnan(gaps) & (snapshot.values != values), np.inf, np.nan_to_num(gaps))
    found, offset = np.zeros(table.total), 0
    for piece, present, fits in zip(snapshot.pieces, snapshot.present, snapshot.fits, strict=True):
        if not (present and fits):
            continue
        where = table.positions(piece) if piece.name in table.rows else None
        if where is not None:
            found[where] = np.maximum(found[where], np.abs(gaps[offset : offset + piece.numel]))
        offset += piece.numel
    return found


def assert_close(scenario: Scenario, one: Sequence[Trace], other: Sequence[Trace]) -> None:
    """Traces of two worlds are no further apart than the reference's noise floor; of a training in doubt that says nothing."""
    run = ReferenceRun.of(scenario)
    if run.reference().doubt:
        event("in doubt")
    elif excess(run.reference(), one, other) > 1.0:
        assert excess(run.confirming_reference(), one, other) <= 1.0


HALVED = Scenario(
    training=Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(3,))),
    layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=3),)), parallelisms=(Replicate(compression=Compression.FP16),)),
)
"""Three ranks add up gradients in float16, each world in an order of its own."""


@settings(UNHURRIED, max_examples=EXAMPLES)
@given(scenarios(max_ranks=4))
@example(HALVED)
def test_sim_equals_gloo(scenario: Scenario) -> None:
    """On the same scenario threads and processes leave the same tensors within the floor, and fail both or not at all."""
    found = {world: left_in(world, scenario) for world in ("sim", "gloo")}
    failed = {world for world, traces in found.items() if traces is None}
    event(f"failed: {len(failed)}")
    assert len(failed) != 1, f"failed in {failed} only"
    if not failed:
        sim, gloo = found["sim"], found["gloo"]
        assert list(map(structure, sim)) == list(map(structure, gloo))
        assert_close(scenario, gloo, sim)
        if scenario.layout.mesh.num_ranks <= 2:
            assert numbers(sim) == numbers(gloo)
