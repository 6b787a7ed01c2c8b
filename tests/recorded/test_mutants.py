"""Recordings show each mutant, no later than a comparison of all values does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from equivcheck import Outcome
from equivcheck.mutants.registry import mutant
from equivcheck.recording.compare.optimizer_rounding import ABOUT_MUON
from equivcheck.scenario import Muon, Scenario
from mutants.minimums import MINIMUMS
from mutants.test_every_mutant import WITHOUT_VALUES
from recorded.places import later_than
from support.supported import require_supported
from tools.recorded.mutants import NEVER_FINISH, names, right_causes
from tools.recorded.runs import check_both

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = names()
RIGHT: dict[Scenario, str] = {MINIMUMS[name]: name for name in reversed(NAMES)}
"""Distinct scenarios, each with the first mutant that has it."""


EACH = 8
"""One in so many mutants and scenarios is tested by default, and all of them in torch environments."""


def _some(values: Iterable[Any], ids: Iterable[str]) -> Iterator[Any]:
    """Parameters, most of them marked as slow."""
    for number, (value, name) in enumerate(zip(values, ids, strict=True)):
        yield pytest.param(value, id=name, marks=pytest.mark.slow if number % EACH else ())


def test_mutants_that_never_finish_are_known() -> None:
    """They hang or crash in their first step."""
    assert {*NEVER_FINISH} == {*WITHOUT_VALUES}


@pytest.mark.parametrize("name", [*_some(NAMES, NAMES)])
def test_a_recording_shows_a_mutant(name: str, tmp_path: Path) -> None:
    """The first difference is no later, and in the same tensor. A cause is one of the mutant's, or none."""
    require_supported(MINIMUMS[name])
    both = check_both(MINIMUMS[name], tmp_path, mutant(name).plant)
    assert both.full.divergence is not None
    assert both.recorded.outcome is Outcome.DIVERGED, both.recorded
    first = both.full.divergence
    assert not later_than(both.recorded, first.step, first.phase, first.tensor)
    assert both.recorded.cause in (None, *right_causes(name)), both.recorded


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
        assert any(gap in both.recorded.reason for gap in OPEN_GAPS[scenario.layout.mesh.names[-1]]), both.recorded


_SHARED = ("all ranks of B have the same samples", "samples of B are not in A")
OPEN_GAPS = {"tp": _SHARED, "cp": _SHARED, "pp": ("counts more often, or less often",)}
"""Doubts by the mesh's last axis. Tensor- and context-parallel ranks share samples, or have parts of them, and such small models
do not show that parameters are sharded. Pipeline chunks of unlike size repeat a row, which a recording cannot tell from data."""
