"""How long a sweep waits for programs that never end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from equivcheck.oracle.cases import PROGRAM_SECONDS_OF_THREADS
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
    some = itertools.islice(Sweep(operations=("relu",)).programs(), 3)
    assert not sweep.swept(some).num_findings
    assert deadlines == {PROGRAM_SECONDS_OF_THREADS}
