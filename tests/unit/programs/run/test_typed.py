"""Programs with the collectives of spmd_types, and its type checker's judgement."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings

pytest.importorskip("spmd_types", reason="no dependency: users bring it")

from equivcheck import UsageError, check
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Operation, Redistribution, TensorProgram
from equivcheck.programs.run.faults import MissingConversion
from equivcheck.programs.run.one_device import ProgramPlan
from equivcheck.programs.run.plain import target as plain_target
from equivcheck.programs.run.plain.typed import TypedTarget
from equivcheck.programs.verdict import BACKWARD
from equivcheck.strategies import programs
from unit.programs.run.test_targets import WITH_RULES, program

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@given(programs(operations=WITH_RULES))
@settings(max_examples=40, deadline=None)
def test_types_accept_what_agrees_with_one_device(program: TensorProgram) -> None:
    """With uneven and empty shards, several axes, and gradients. Rounding may leave a few undecided."""
    verdict = check_program(program, target="typed")
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.INCONCLUSIVE), verdict.describe()
    assert not verdict.types


class _TypedMissingConversion(MissingConversion, TypedTarget):
    """Operations use partial values without reducing them."""


def test_types_refuse_an_operation_on_addends() -> None:
    """The type error is reported in addition to the wrong numbers."""
    verdict = check_program(program("P(sum)", Operation(name="exp")), target=_TypedMissingConversion)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.types.startswith("v1 exp: SpmdTypeError: Partial type")
    assert "types: v1 exp: " in verdict.describe()


class _Refused(TypedTarget):
    """A type checker that accepts nothing."""

    @classmethod
    def type_errors(cls, plan: ProgramPlan) -> str:
        """Reject any program."""
        return "v1 exp: SpmdTypeError: no\n\nOr else"


def test_types_that_refuse_what_is_right_are_a_finding() -> None:
    """Either the checker or the program is wrong."""
    verdict = check_program(program("S(0)", Operation(name="exp")), target=_Refused)
    assert verdict.outcome is Outcome.CRASHED
    assert verdict.reason == "the type checker rejects a correct program: v1 exp: SpmdTypeError: no"


def test_types_do_not_see_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax along a sharded dim has right types and wrong numbers."""
    monkeypatch.setattr(plain_target, "needs", lambda *_: (("S(0)",), "S(0)"))
    verdict = check_program(program("S(0)", Operation(name="softmax")), target="typed")
    assert verdict.outcome is Outcome.DIVERGED
    assert not verdict.types


def test_a_gradient_that_the_library_does_not_take_is_a_refusal() -> None:
    """`sum` gives its input an expanded gradient, but `all_reduce` needs a contiguous one."""
    statements = (*program("P(sum)", Redistribution(placements=("R",))).statements, Operation(name="sum"))
    verdict = check_program(TensorProgram(mesh=(2,), statements=statements), target="typed")
    assert verdict.outcome is Outcome.EQUIVALENT
    assert [(each.statement, "must be contiguous" in each.text) for each in verdict.refusals] == [(BACKWARD, True)]


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command to install it."""
    monkeypatch.setitem(sys.modules, "spmd_types", None)
    monkeypatch.delitem(sys.modules, "equivcheck.programs.run.plain.typed")
    with pytest.raises(UsageError, match="pip install spmd_types"):
        check(program("R"), target="typed")
