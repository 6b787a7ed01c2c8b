"""Statements that some ranks refuse, and others do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.programs.run.one_device import Outputs
from equivcheck.programs.run.rank import DTensorTarget

LEAF = Leaf(shape=(4, 6), placements=("S(0)",))
PROGRAM = TensorProgram(
    mesh=(2,), statements=(LEAF, Operation(name="exp"), Operation(name="softmax", dim=0), Operation(name="sum"))
)


class _Refusing(DTensorTarget):
    """All ranks refuse one operation, and some refuse another."""

    by_all, by_some, ranks = "exp", "softmax", (1,)
    other_words = False

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Refuse operations with a clear error."""
        if statement.name == self.by_all or (statement.name == self.by_some and dist.get_rank() in self.ranks):
            raise NotImplementedError(f"{statement.name} is not supported")
        if statement.name == self.by_some and self.other_words:
            raise RuntimeError(f"{statement.name} is not supported")
        return super().call(statement, arguments)


class _InOtherWords(_Refusing):
    """The other ranks refuse it as well, with another error type."""

    other_words = True


class _ByAll(_Refusing):
    """All ranks refuse both."""

    ranks = (0, 1)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_one_rank_refuses_has_crashed(world: str) -> None:
    """It is a crash although the other rank waits in a collective, and although both refused an earlier statement."""
    assert check_program(PROGRAM, world=world).outcome is Outcome.EQUIVALENT
    verdict = check_program(PROGRAM, target=_Refusing, world=world, deadline=20)
    assert verdict.outcome is Outcome.CRASHED
    assert "softmax is not supported" in verdict.reason


def test_what_ranks_refuse_with_different_errors_has_crashed() -> None:
    """Different errors are not the same refusal."""
    verdict = check_program(PROGRAM, target=_InOtherWords)
    assert verdict.outcome is Outcome.CRASHED
    assert "or raise another error" in verdict.reason


def test_what_all_ranks_refuse_alike_goes_on() -> None:
    """The single-device value replaces the result, as a constant."""
    verdict = check_program(PROGRAM, target=_ByAll)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert [each.statement for each in verdict.refusals] == [1, 2]
