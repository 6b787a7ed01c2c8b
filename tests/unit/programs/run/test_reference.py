"""The reference of a program, if rounding changes shapes or an operation computes in float32."""

from __future__ import annotations

import pytest

from equivcheck import check
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, Statement, TensorProgram
from equivcheck.programs.run.one_device import plan_of
from equivcheck.programs.run.reference import NUM_COPIES, reference_of

NO_ELEMENT_IS_NONZERO = (
    Leaf(shape=(3, 3), placements=("S(0)",), seed=7),
    Operation(name="dropout_all"),
    Operation(name="nonzero"),
)
COMBINED_WITH_NOTHING = (
    Redistribution(placements=("R",), argument=2),
    Leaf(shape=(0, 2), placements=("R",), seed=2),
    Operation(name="mse_loss_none", arguments=(3, 1)),
)


@pytest.mark.parametrize("then", [(), COMBINED_WITH_NOTHING], ids=["last", "combined"])
def test_rounding_that_changes_a_shape_is_inconclusive(then: tuple[Statement, ...]) -> None:
    """Also if the other shape makes a later operation raise in the disturbed runs, which is no failure of the checker."""
    verdict = check(TensorProgram(mesh=(2,), statements=(*NO_ELEMENT_IS_NONZERO, *then)))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "shape" in verdict.reason


def test_a_gradient_that_is_rounded_to_float32_is_no_finding() -> None:
    """A softmax in float32 rounds its backward too, so that a gradient of about zero can have either sign."""
    program = TensorProgram(
        mesh=(2,),
        statements=(
            Leaf(shape=(), placements=("R",)),
            Leaf(shape=(2, 4, 4), placements=("S(1)",)),
            Operation(name="foreach_norm", arguments=(2, 1)),
            Operation(name="softmax_float", arguments=(2,)),
        ),
    )
    assert check(program).outcome is Outcome.EQUIVALENT


def test_an_undefined_gradient_is_not_disturbed() -> None:
    """Autograd gives None for it, here as the gradient of the zero norm of float32 values."""
    statements = (Leaf(shape=(2, 1), placements=("R",)), Operation(name="to_float32"), Operation(name="norm_0"))
    assert check(TensorProgram(mesh=(2,), statements=statements)).outcome is Outcome.EQUIVALENT


def test_bits_of_numbers_do_not_loosen_the_tolerance_of_numbers() -> None:
    """Bits read as integers are about 1e18, so that relative to them every other difference would be rounding."""
    statements = (Leaf(shape=(2,), placements=("R",)), Operation(name="real_view"), Operation(name="clone", arguments=(2,)))
    values = reference_of(plan_of(TensorProgram(mesh=(1,), statements=statements)), frozenset(), NUM_COPIES).moments[0]
    assert values.dtypes == ("float64", "int64", "float64")
    assert (values.tolerances[[0, 2]] < 1e-12).all()
