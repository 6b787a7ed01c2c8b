"""Statement that a verdict names if ranks raise, hang or differ."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.run.one_device import Outputs
from equivcheck.programs.run.rank import DTensorTarget
from support.verdicts import first_divergence

PROGRAM = TensorProgram(
    mesh=(2,),
    statements=(
        Leaf(shape=(4,), placements=("S(0)",)),
        Operation(name="exp"),
        Redistribution(placements=("R",)),
        Operation(name="sum"),
    ),
)


class _MovesOnOneRank(DTensorTarget):
    """Rank 1 communicates in a redistribution, and rank 0 does not."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Add an all-reduce on rank 1."""
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))
        return super().redistribute(value, placements)


class _MovesInBackward(DTensorTarget):
    """Rank 1 communicates while gradients are read."""

    def gradient(self, value: torch.Tensor) -> torch.Tensor | None:
        """Add an all-reduce on rank 1."""
        if dist.get_rank() == 1 and value.grad is not None:
            dist.all_reduce(torch.ones(1))
        return super().gradient(value)


@pytest.mark.parametrize(
    ("target", "where"), [(_MovesOnOneRank, "v2 redistribution of v1 exp: "), (_MovesInBackward, "backward: ")]
)
def test_a_hang_says_where_it_is(target: type[DTensorTarget], where: str) -> None:
    """The verdict names the statement, or the backward."""
    verdict = check_program(PROGRAM, target=target)
    assert verdict.outcome is Outcome.HUNG
    assert verdict.reason.startswith(where)


class _KeepsAll(DTensorTarget):
    """An operation whose result claims to be sharded but is full on each rank."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Return values that are right on rank 0. Reading them fails later."""
        (found,) = super().call(statement, arguments)
        if statement.name != "exp":
            return (found,)
        whole, cut = self.full_tensor(found), cast("DTensor", found)
        return (self.from_local(whole, cut.placements, cut.shape, cut.stride()),)


def test_a_value_that_is_not_as_its_placements_say_is_to_blame() -> None:
    """The verdict names this statement, not the one that raises because of it."""
    verdict = check_program(PROGRAM, target=_KeepsAll)
    assert verdict.outcome is Outcome.CRASHED
    assert "v1 exp: PartsDisagree: a part of a DTensor of shape (4,) has shape (4,), not (2,)" in verdict.reason


@pytest.mark.torch(">=2.10", "a reduction of a result is known to be wrong on torch 2.9")
def test_parts_that_differ_unread_are_told_before_what_is_computed_of_them() -> None:
    """Reading ignores an extra part, but a sum includes it."""
    statements = (Leaf(shape=(1,), placements=("S(0)",)), Operation(name="exp"), Operation(name="sum"))
    verdict = check_program(TensorProgram(mesh=(2,), statements=statements), target=_KeepsAll)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.reason.startswith("step 0 value v2 sum ")
    assert "; earlier: rank 1 raised" in verdict.reason
    assert "v1 exp: PartsDisagree: a part of a DTensor of shape (1,) has shape (1,), not (0,)" in verdict.reason


class _Narrows(DTensorTarget):
    """An operation whose result has too few digits."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Return the right value with another dtype."""
        found = super().call(statement, arguments)
        return tuple(each.float() for each in found) if statement.name == "exp" else found


def test_a_value_of_another_dtype_is_to_blame() -> None:
    """The verdict names this statement, not the one that raises on mixed dtypes."""
    statements = (Leaf(shape=(4,), placements=("S(0)",)), Operation(name="exp"), Operation(name="isclose", arguments=(1, 2)))
    verdict = check_program(TensorProgram(mesh=(2,), statements=statements), target=_Narrows)
    assert verdict.outcome is Outcome.CRASHED
    assert "v1 exp: PartsDisagree: a DTensor is float32 of shape (4,), on one device float64 of shape (4,)" in verdict.reason


class _RaisesInSum(DTensorTarget):
    """A sum that raises."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Run every other operation."""
        if statement.name == "sum":
            raise ValueError("a sum that fails")
        return super().call(statement, arguments)


class _DoublesAndRaises(_RaisesInSum):
    """A sum that raises, after a wrong value."""

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Double the value."""
        return tuple(2 * each for each in super().call(statement, arguments))


def test_a_value_that_differs_before_a_statement_raises_is_to_blame() -> None:
    """If no value differs, the verdict names the statement that raises."""
    differs, raises = check_program(PROGRAM, target=_DoublesAndRaises), check_program(PROGRAM, target=_RaisesInSum)
    assert first_divergence(differs).tensor == "v1 exp"
    assert "; then: rank " in differs.reason
    assert "v3 sum: ValueError: a sum that fails" in differs.reason
    assert raises.outcome is Outcome.CRASHED
