"""How long a sweep waits for programs that never end."""

from __future__ import annotations

from typing import Any

import pytest

from equivcheck.oracle.cases import PROGRAM_SECONDS_OF_THREADS, SECONDS_WITHOUT_ELEMENTS
from equivcheck.oracle.tensor_program import check_program
from equivcheck.sweep import sweep
from equivcheck.sweep.programs import Sweep
from equivcheck.verdict.program import ProgramVerdict


def test_a_sweep_waits_as_long_as_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some views compute for all of a deadline, and each would cost a sweep half a minute."""
    deadlines = set()

    def noted(program: Any, *, world: str, deadline: float) -> ProgramVerdict:
        deadlines.add(deadline)
        return check_program(program, world=world, deadline=deadline)

    monkeypatch.setattr(sweep, "check_program", noted)
    assert not sweep.swept(Sweep(operations=("relu",)).programs()).num_findings
    assert deadlines == {PROGRAM_SECONDS_OF_THREADS, SECONDS_WITHOUT_ELEMENTS}
