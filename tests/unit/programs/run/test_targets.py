"""Programs on plain tensors, and on DTensors whose operations are compiled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from equivcheck import UsageError, check
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs import check as check_module
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.run.faults import MissingConversion
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.programs.run.plain.collectives import Collectives
from equivcheck.programs.run.plain.rules import ALONG_A_DIM, ELEMENTWISE, LINEAR, PRODUCTS, SUMS, needs
from equivcheck.programs.run.plain.target import PlainTarget
from equivcheck.strategies import programs
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence

WITH_RULES = tuple(sorted({*ELEMENTWISE, *LINEAR, *ALONG_A_DIM, *SUMS, *PRODUCTS}))


@given(programs(operations=WITH_RULES))
@settings(max_examples=40, deadline=None)
def test_programs_on_plain_tensors_are_equivalent(program: TensorProgram) -> None:
    """Operations run on shards if possible, otherwise after a collective."""
    verdict = check_program(program, target="plain")
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.INCONCLUSIVE), verdict.describe()


@given(programs())
@settings(max_examples=20, deadline=None)
def test_operations_without_a_rule_are_on_whole_tensors(program: TensorProgram) -> None:
    """They agree too, which tests the conversions around them."""
    check_program(program, target="plain").assert_no_finding()


PLACEMENTS = ("R", "S(0)", "S(1)", "P(sum)", "P(avg)")


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_every_change_of_placement(mesh: tuple[int, ...]) -> None:
    """Uneven, with empty shards, and with one dim sharded by both axes: values and gradients."""
    pairs = [(old, new) for old in PLACEMENTS for new in PLACEMENTS]
    for old, new in pairs:
        for lies, wanted in (
            (((old,), (new,)),) if len(mesh) == 1 else (((old, "S(0)"), ("S(0)", new)), ((old, new), (new, "S(1)")))
        ):
            leaf = Leaf(shape=(5, 4), placements=lies)
            program = TensorProgram(mesh=mesh, statements=(leaf, Redistribution(placements=wanted)))
            verdict = check(program, target="plain")
            assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
            assert not verdict.refusals


def test_a_gradient_that_is_undefined_on_one_device_may_be_zeros() -> None:
    """Backwards of collectives receive zeros for it; DTensor keeps it undefined."""
    counted = program("S(0)", Operation(name="norm_0"))
    assert check(counted, target="plain").outcome is Outcome.EQUIVALENT
    assert check(counted).outcome is Outcome.EQUIVALENT


def program(placement: str, *statements: Operation | Redistribution, mesh: tuple[int, ...] = (2,)) -> TensorProgram:
    """Statements on a leaf of 4 x 6."""
    return TensorProgram(mesh=mesh, statements=(Leaf(shape=(4, 6), placements=(placement,)), *statements))


def test_addends_of_a_maximum_are_refused() -> None:
    """Only sums have a collective with a derivative."""
    verdict = check(program("P(max)", Operation(name="exp")), target="plain")
    assert verdict.outcome is Outcome.EQUIVALENT
    assert "not supported on plain tensors" in verdict.refusals[0].text


def test_a_missing_conversion_is_caught() -> None:
    """The value of a nonlinear operation differs."""
    wrong = check_program(program("P(sum)", Operation(name="exp")), target=MissingConversion)
    assert wrong.outcome is Outcome.DIVERGED
    check(program("P(sum)", Operation(name="exp")), target="plain").assert_equivalent()


class _WithoutBackward(Collectives):
    """Gathers without summing gradients."""

    def all_gather(self, part: object, dim: int, extent: int) -> object:  # type: ignore[override]
        """Each rank takes the gradient of its own copy."""
        whole = super().all_gather(part.detach(), dim, extent)  # type: ignore[attr-defined]
        own = self.shard_to_partial(part, dim, extent)  # type: ignore[arg-type]
        return whole + own - own.detach()


class _WrongBackward(PlainTarget):
    """A gather whose backward takes a shard of its own gradient instead of summing over all ranks."""

    collectives = _WithoutBackward


def test_a_gather_that_adds_no_gradients_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient differs, and no known DTensor error explains it, because ranks run no DTensors."""
    monkeypatch.setattr(check_module, "known_difference", lambda *_: ON_FILE[0])
    gathered = program("S(0)", Redistribution(placements=("R",)), Operation(name="exp"))
    assert first_divergence(check_program(gathered, target=_WrongBackward)).phase is Phase.GRADIENT


def test_rules_are_of_operations_that_there_are() -> None:
    """An operation without a rule needs replicated arguments."""
    assert set(WITH_RULES) <= set(OPERATIONS)
    assert needs(Operation(name="median", dim=0), ["S(1)"], [(2, 3)]) == (("R",), "R")
    assert needs(Operation(name="mm", arguments=(2, 1)), ["S(1)", "R"], [(2, 3), (3, 4)]) == (("S(1)", "S(0)"), "P(sum)")


def test_compiled_operations_are_equivalent_in_processes() -> None:
    """The world is gloo instead of sim, and the verdict says so."""
    verdict = check(program("S(0)", Operation(name="softmax"), Operation(name="mul_scalar")), target="compiled")
    verdict.assert_equivalent()
    assert verdict.world == "gloo"
    assert not verdict.refusals


def test_an_unknown_target_is_refused() -> None:
    """The error lists all targets."""
    with pytest.raises(UsageError, match="Expected dtensor, plain, typed, compiled"):
        check(program("R"), target="plane")
