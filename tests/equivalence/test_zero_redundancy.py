"""`ZeroRedundancyOptimizer`: one rank updates a parameter for all, and keeps its state for all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from equivcheck import Scenario, check
from equivcheck.layouts.composition.program import rank_program
from equivcheck.scenario import DDP, Layout
from equivcheck.strategies import layouts, scenarios
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.trace import Trace
from support.fresh import drawn_afresh

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def _sharing_layouts(draw: st.DrawFn) -> Layout:
    layout = draw(layouts(tags=("ddp",)))
    (ddp,) = layout.parallelisms
    assert isinstance(ddp, DDP)
    sharing = replace(ddp, zero_redundancy=True, parameters_as_bucket_view=draw(st.booleans()), static_graph=False)
    return replace(layout, parallelisms=(sharing,))


SHARING = scenarios(layouts=_sharing_layouts())


@drawn_afresh(SHARING, examples=max(6, settings().max_examples // 16))
def test_sharing_updates_equals_single_device(scenario: Scenario) -> None:
    """Every optimizer, with its flags, groups, schedule and clipping, comes to the same when ranks share its update."""
    check(scenario).assert_no_finding()


@drawn_afresh(SHARING, examples=max(6, settings().max_examples // 16))
def test_state_is_kept_by_one_rank_alone(scenario: Scenario) -> None:
    """No two ranks keep state of the same parameter, and no rank keeps that of all where several could."""
    members = ranks("sim", scenario.layout.mesh.num_ranks)
    traces: tuple[Trace, ...] = members.run(rank_program, scenario, schedule_seed=scenario.schedule_seed).values
    kept = [{piece.name.rpartition("/")[0] for piece in trace.state.pieces} for trace in traces]
    holders = Counter(name for names in kept for name in names)
    assert set(holders.values()) <= {1}
    if len(kept) > 1 and len(holders) == len(traces[0].steps[0].parameters.pieces) > 1:
        assert sum(map(bool, kept)) > 1
