"""Deadlines in sweeps for programs that never end."""

from __future__ import annotations

from typing import Any

import pytest

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.deadline import PROGRAM_SECONDS, SECONDS_WITHOUT_ELEMENTS, USUAL_DEADLINE, seconds_of_program
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.programs.nouns.operations.families.matmul import WEIGHED
from equivcheck.programs.sweep import sweep
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.programs.verdict import ProgramVerdict


def test_a_sweep_waits_as_long_as_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some views compute until the deadline, and each would cost a sweep half a minute."""
    deadlines = set()

    def noted(program: Any, *, deadline: float, **options: Any) -> ProgramVerdict:
        deadlines.add(deadline)
        return check_program(program, deadline=deadline, **options)

    monkeypatch.setattr(sweep, "check_program", noted)
    assert not sweep.run_sweep(Sweep(operations=("relu",)).programs()).num_findings
    assert deadlines == {PROGRAM_SECONDS, SECONDS_WITHOUT_ELEMENTS}


@pytest.mark.slow
def test_what_dtensor_takes_long_to_refuse_is_not_endless() -> None:
    """DTensor tries all placements for attention's decomposition for ten seconds before it refuses."""
    leaves = [Leaf(shape=(2, 2, 3, 4), placements=(placement,)) for placement in ("R", "R", "S(0)")]
    program = TensorProgram(mesh=(2,), statements=(*leaves, Operation(name=WEIGHED, arguments=(3, 2, 1))))
    assert seconds_of_program(program, "sim", USUAL_DEADLINE) == USUAL_DEADLINE
    verdict = sweep.run_sweep([program])
    assert verdict.outcomes == {Outcome.EQUIVALENT: 1}
    assert verdict.refused == {WEIGHED: 1}
