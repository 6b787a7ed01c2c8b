"""Recordings show each mutant, no later than a comparison of all values does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from equivcheck import Outcome
from equivcheck.mutants.registry import mutant, mutants
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.compare.optimizer_rounding import ABOUT_MUON
from equivcheck.scenario import Muon, Scenario
from mutants.minimums import MINIMUMS
from mutants.test_every_mutant import WITHOUT_VALUES
from recorded.places import later_than
from support.supported import require_supported
from tools.recorded.runs import check_both

pytestmark = pytest.mark.filterwarnings("ignore")

NOT_RECORDED = {
    "norm_after_clipping_returned": "the clipping function returns the right norm, and a wrapper another one",
    "state_not_restored": "a recording is about one job, without the checkpoint of an earlier one",
    "rank_skips_update": "a rank that never updates writes no step",
    "read_before_done": "between processes, the reduction may have finished in time",
    "momentum_forgotten": "in one step, only the optimizer's state differs, and one run has none: this is INCONCLUSIVE",
}
"""Mutants that a recording cannot show, with the reason."""
NAMES = [name for name in mutants() if name not in {**WITHOUT_VALUES, **NOT_RECORDED}]
RIGHT: dict[Scenario, str] = {MINIMUMS[name]: name for name in reversed(NAMES)}
"""Distinct scenarios, each with the first mutant that has it."""


EACH = 8
"""One in so many mutants and scenarios is tested by default, and all of them in torch environments."""


def _some(values: Iterable[Any], names: Iterable[str]) -> Iterator[Any]:
    """Parameters, most of them marked as slow."""
    for number, (value, name) in enumerate(zip(values, names, strict=True)):
        yield pytest.param(value, id=name, marks=pytest.mark.slow if number % EACH else ())


@pytest.mark.parametrize("name", [*_some(NAMES, NAMES)])
def test_a_recording_shows_a_mutant(name: str, tmp_path: Path) -> None:
    """The first difference is no later, and in the same tensor. A cause is one of the mutant's, or none."""
    require_supported(MINIMUMS[name])
    both = check_both(MINIMUMS[name], tmp_path, mutant(name).plant)
    assert both.full.divergence is not None
    assert both.recorded.outcome is Outcome.DIVERGED, both.recorded
    first = both.full.divergence
    assert not later_than(both.recorded, first.step, first.phase, first.tensor)
    assert both.recorded.cause in (None, *mutant(name).causes, *ALSO_RIGHT.get(name, ())), both.recorded


@pytest.mark.parametrize("scenario", [*_some(RIGHT, RIGHT.values())])
def test_a_recording_without_a_mutant_is_equivalent(scenario: Scenario, tmp_path: Path) -> None:
    """All scenarios in which mutants are planted."""
    require_supported(scenario)
    both = check_both(scenario, tmp_path)
    assert both.full.outcome is Outcome.EQUIVALENT
    if both.recorded.outcome is not Outcome.EQUIVALENT:
        assert both.recorded.outcome is Outcome.INCONCLUSIVE, both.recorded
        if isinstance(scenario.training.optimizer, Muon):
            assert both.recorded.first is not None
            assert both.recorded.first.detail == ABOUT_MUON
            return
        assert scenario.layout.mesh.names[-1] in OPEN
        assert any(gap in both.recorded.reason for gap in OPEN_GAPS), both.recorded


OPEN = ("tp", "cp")
OPEN_GAPS = ("all ranks of B have the same samples", "samples of B are not in A")
"""Doubts about ranks that share samples, or have parts of them. Such small models do not show that parameters are sharded."""
ALSO_RIGHT: dict[str, tuple[Cause, ...]] = {
    "clamped_before_reduction": (Cause.GRADIENT_LOST,),
    "parameters_of_last_step": (Cause.NOT_UPDATED,),
    "column_input_gradient_not_reduced": (Cause.NOT_REDUCED,),
    "head_input_gradient_not_reduced": (Cause.NOT_REDUCED,),
    "copy_to_region_missing": (Cause.NOT_REDUCED,),
    "experts_copy_to_region_missing": (Cause.NOT_REDUCED,),
    "router_learns_from_partial_sum": (Cause.NOT_REDUCED,),
    "pipeline_copies_not_summed": (Cause.NOT_REDUCED,),
    "label_lost_at_borders": (Cause.GRADIENT_LOST,),
}
"""Causes that describe the recorded values of a mutant exactly, although its fault is elsewhere."""
