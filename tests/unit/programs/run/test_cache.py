"""Single-device runs are cached for programs that differ only in placements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.programs.run import cache
from equivcheck.programs.run.one_device import Outputs, plan_of
from equivcheck.programs.run.rank import DTensorTarget


def _program(placement: str, seed: int = 0) -> TensorProgram:
    statements = (Leaf(shape=(4, 2), placements=(placement,), seed=seed), Operation(name="exp"), Operation(name="square"))
    return TensorProgram(mesh=(2,), statements=statements)


@pytest.fixture
def num_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TensorProgram]]:
    """Programs run on one device from now on."""
    ran: list[TensorProgram] = []

    def noted(program: TensorProgram) -> cache.ProgramPlan:
        ran.append(program)
        return plan_of(program)

    monkeypatch.setattr(cache, "plan_of", noted)
    cache._plan.cache_clear()
    yield ran
    cache._plan.cache_clear()


def test_programs_that_differ_in_placements_share_what_one_device_computes(num_plans: list[TensorProgram]) -> None:
    """Each verdict still has its own program."""
    for placement in ("R", "S(0)", "S(1)", "P(sum)"):
        verdict = check_program(_program(placement))
        assert verdict.outcome is Outcome.EQUIVALENT
        assert verdict.program == _program(placement)
    assert len(num_plans) == 1
    check_program(_program("R", seed=1))
    assert len(num_plans) == 2


class _Refuses(DTensorTarget):
    """Continues after `exp` with single-device values."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Refuse one operation."""
        if statement.name == "exp":
            raise NotImplementedError("not implemented")
        return super().call(statement, arguments)


class _Writes(_Refuses):
    """Writes to these values too."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Run the next operation after an in-place one."""
        if statement.name == "square":
            with torch.no_grad():
                arguments[0].mul_(2.0)
        return super().call(statement, arguments)


def test_what_is_kept_is_not_written_to() -> None:
    """A rank continues with a copy of the cached value."""
    assert check_program(_program("R"), target=_Writes).outcome is Outcome.DIVERGED
    assert check_program(_program("R"), target=_Refuses).outcome is Outcome.EQUIVALENT
