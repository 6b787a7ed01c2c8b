"""Single-device results against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, RoundTrip, TensorProgram
from equivcheck.programs.run.one_device import plan_of, run_on_one_device
from equivcheck.programs.run.reference import reference_of
from equivcheck.programs.run.values import full_tensor, weights_of

LEAF = Leaf(shape=(2, 2), placements=("R",))


def test_a_sum_of_products() -> None:
    """The gradient of w * (a * b).sum() is w * b, and w * a."""
    other = Leaf(shape=(2, 2), placements=("R",), seed=1)
    statements = (LEAF, other, Operation(name="mul", arguments=(2, 1)), Operation(name="sum"))
    run = run_on_one_device(plan_of(TensorProgram(mesh=(2,), statements=statements)))
    a, b, weight = full_tensor(LEAF), full_tensor(other), weights_of((), 3)
    assert run.outputs[3][0] == a[0, 0] * b[0, 0] + a[0, 1] * b[0, 1] + a[1, 0] * b[1, 0] + a[1, 1] * b[1, 1]
    assert [gradient.tolist() for gradient in run.gradients if gradient is not None] == [
        (weight * b).tolist(),
        (weight * a).tolist(),
    ]


def test_placements_change_nothing_on_one_device() -> None:
    """Redistributions and round trips are the identity, forward and backward."""
    statements = (LEAF, Redistribution(placements=("S(0)",)), RoundTrip())
    run = run_on_one_device(plan_of(TensorProgram(mesh=(2,), statements=statements)))
    assert torch.equal(run.outputs[2][0], full_tensor(LEAF))
    assert run.gradients[0] is not None
    assert torch.equal(run.gradients[0], weights_of((2, 2), 2))


def test_a_tensor_that_an_operation_gives_back_is_named_once() -> None:
    """flatten() returns a vector itself, with one gradient, but not a matrix."""
    for shape, names in (
        ((2,), ["v2 into nothing", "v0 into flatten, exp"]),
        ((1, 2), ["v2 into nothing", "v1 into exp", "v0 into flatten"]),
    ):
        statements = (Leaf(shape=shape, placements=("R",)), Operation(name="flatten"), Operation(name="exp"))
        plan = plan_of(TensorProgram(mesh=(2,), statements=statements))
        assert list(replace(plan, every_gradient=True).compared_gradients) == names


def test_what_does_not_apply_is_a_clone() -> None:
    """A matrix has no dim 5, and a vector cannot be sharded along dim 1."""
    statements = (LEAF, Operation(name="softmax", dim=5), Operation(name="sum"), Redistribution(placements=("S(1)",)))
    plan = plan_of(TensorProgram(mesh=(2,), statements=statements))
    assert plan.applies == (True, False, True, False)
    assert torch.equal(plan.outputs[1][0], full_tensor(LEAF))


def test_what_is_not_finite_does_not_apply() -> None:
    """The variance of one element says nothing."""
    leaf = Leaf(shape=(), placements=("R",))
    assert plan_of(TensorProgram(mesh=(2,), statements=(leaf, Operation(name="var")))).applies == (True, False)


def test_equal_values_are_not_sorted() -> None:
    """Torch does not define which equal value comes first."""
    statements = (LEAF, Operation(name="zeros_like"), Operation(name="sort"))
    assert plan_of(TensorProgram(mesh=(2,), statements=statements)).applies == (True, True, False)


def test_what_lies_around_a_view_is_not_seen() -> None:
    """One of five elements behaves like a separate one, so that equal values give equal results."""
    five = Leaf(shape=(5,), placements=("R",))
    statements = (five, Operation(name="as_strided"), Operation(name="element", arguments=(2,)), Operation(name="as_strided"))
    assert plan_of(TensorProgram(mesh=(2,), statements=statements)).applies == (True, True, True, False)


def test_a_refused_statement_has_no_gradient() -> None:
    """It is a constant, so earlier statements are not differentiated."""
    plan = plan_of(TensorProgram(mesh=(2,), statements=(LEAF, Operation(name="exp"), Operation(name="sum"))))
    run = run_on_one_device(plan, refused=frozenset({1}))
    assert run.gradients == (None,)
    assert torch.equal(run.outputs[2][0], full_tensor(LEAF).exp().sum())


def test_a_shape_that_rounding_changes_proves_nothing() -> None:
    """The number of non-zero elements is noise if they are differences of equal numbers."""
    statements = (LEAF, Operation(name="sub", arguments=(1, 1)), Operation(name="nonzero"))
    found = reference_of(plan_of(TensorProgram(mesh=(2,), statements=statements)), frozenset(), 3)
    assert found.doubt is not None
    assert "shape" in found.doubt.reason


def test_the_noise_of_an_operation_is_that_of_the_coarsest_dtype_on_its_way() -> None:
    """Torch computes distances between integers in float32 and returns float64; ranks that add up parts round differently."""
    counts = (Leaf(shape=(3, 1), placements=("S(0)",)), Operation(name="count_nonzero_dim", dim=1))
    losses = (*counts, Leaf(shape=(1,), placements=("R",)), Operation(name="triplet_none", arguments=(2, 1)))
    found = reference_of(plan_of(TensorProgram(mesh=(2,), statements=losses)), frozenset(), 3)
    assert found.doubt is None
    assert 1e-8 < found.moments[0].tolerances.max() < 1e-4
    assert check_program(TensorProgram(mesh=(2,), statements=losses)).outcome is Outcome.EQUIVALENT


def test_a_backward_that_torch_cannot_do_leaves_a_program_without_gradients() -> None:
    """For any error type: foreach addcdiv by a scalar tensor raises IndexError."""
    scalar = Leaf(shape=(), placements=("R",), seed=1)
    statements = (Leaf(shape=(1,), placements=("R",)), scalar, Operation(name="foreach_addcdiv", arguments=(2, 1)))
    assert not plan_of(TensorProgram(mesh=(2,), statements=statements)).differentiable


def test_a_gradient_of_zeros_without_memory_is_compared() -> None:
    """The gradient of sgn has no memory, and converts to an array only on request."""
    sgn = TensorProgram(mesh=(2,), statements=(Leaf(shape=(2,), placements=("S(0)",)), Operation(name="sgn")))
    assert check_program(sgn).outcome is Outcome.EQUIVALENT


def test_integers_that_require_a_gradient_say_nothing() -> None:
    """An in-place comparison between integers and a leaf creates one, whose backward is an internal error."""
    statements = (LEAF, Operation(name="to_int"), Operation(name="le_tensor_", arguments=(1, 2)))
    assert plan_of(TensorProgram(mesh=(2,), statements=statements)).applies == (True, True, False)
