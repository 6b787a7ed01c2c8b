"""Causes are named from sketches alone, and none is named if no known fault gives the values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import equivcheck
from equivcheck import TraceVerdict
from equivcheck.worlds.pool import ranks
from unit.recording.causes.table import CASES, Case
from unit.recording.causes.wrong_trainings import train

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Verdicts = Callable[..., TraceVerdict]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """Compare a training with the right one on one device. Each training runs once."""
    runs: dict[tuple[object, ...], Path] = {}

    def recorded(base: str, fault: str = "", *, layout: str = "one", size: int = 1, moved: int = 0) -> Path:
        key = (base, fault, layout, size, moved)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("trace")
            if size == 1:
                train(runs[key], layout, base, fault, moved)
            else:
                ranks("gloo", size).run(train, runs[key], layout, base, fault)
        return runs[key]

    def compare(case: Case) -> TraceVerdict:
        other = recorded(case.base, case.fault, layout=case.layout, size=case.size)
        return equivcheck.compare(recorded(case.base), other, moved=[recorded(case.base, moved=1)])

    return compare


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.base} {case.layout} {case.size} {case.fault or 'right'}")
def test_a_wrong_training_has_its_cause(compared: Verdicts, case: Case) -> None:
    """The cause and the sentence name the planted fault."""
    verdict = compared(case)
    assert verdict.outcome is (equivcheck.Outcome.DIVERGED if case.fault else equivcheck.Outcome.EQUIVALENT), verdict
    assert verdict.cause is case.cause, verdict
    assert verdict.diagnosis is None or case.words in verdict.diagnosis.sentence
