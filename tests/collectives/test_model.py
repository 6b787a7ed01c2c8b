"""The model itself: a few values by hand, and adjoints by their definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives import model
from collectives.cases import SIZES, inputs_of
from collectives.gradients import COMBINATIONS, Derivative, adjoint, derivatives, weights_of
from collectives.judge import received
from collectives.model import Array

ONE, TWO, THREE = (np.array(value) for value in ([1, 5], [2, -4], [7, 3]))


def listed(found: Sequence[Array]) -> list[list[int]]:
    """As plain lists."""
    return [np.asarray(array).tolist() for array in found]


def test_values_by_hand() -> None:
    """Sums, products, extrema, means and bits of two members, the order of parts, and who gets what."""
    assert listed(model.all_reduce([ONE, TWO], "sum")) == [[3, 1], [3, 1]]
    assert listed(model.all_reduce([ONE, TWO], "product")) == [[2, -20]] * 2
    assert listed(model.all_reduce([ONE, TWO], "avg")) == [[1.5, 0.5]] * 2
    assert listed(model.all_reduce([ONE, TWO], "max")) == [[2, 5]] * 2
    assert listed(model.all_reduce([ONE, TWO], "bxor")) == [[3, 5 ^ -4]] * 2
    assert listed(model.reduce_scatter([[ONE, TWO], [TWO, THREE]], "min")) == [[1, -4], [2, -4]]
    assert listed(model.broadcast([ONE, TWO], 1)) == [[2, -4], [2, -4]]
    assert [listed(found) for found in model.gather([ONE, TWO], 1)] == [[], [[1, 5], [2, -4]]]
    assert listed(model.scatter([[ONE, TWO], [TWO, THREE]], 1)) == [[2, -4], [7, 3]]
    assert [listed(found) for found in model.all_to_all([[ONE, TWO], [THREE, ONE]])] == [[[1, 5], [7, 3]], [[2, -4], [1, 5]]]


def test_integers_wrap_and_booleans_are_logical() -> None:
    """A sum stays in its type; of booleans it is *or*, a product *and*."""
    high = np.array([200], dtype=np.uint8)
    assert listed(model.all_reduce([high, high], "sum")) == [[144], [144]]
    bits = [np.array([True, True, False]), np.array([True, False, False])]
    assert model.fold(bits, "sum").tolist() == [True, True, False]
    assert model.fold(bits, "product").tolist() == [True, False, False]


def test_holders_of_an_extremum_share_its_gradient() -> None:
    """All of the gradients' sum for the only member that holds it, equal parts for several, none for others."""
    ties = [np.array(value, dtype=np.float32) for value in ([1, 5, 0], [2, 5, 0], [2, -4, 0])]
    weights = [np.array(value, dtype=np.float32) for value in ([1, 1, 1], [2, 0, 2], [3, 0, 3])]
    assert listed(model.extremum_adjoint(ties, weights, "max")) == [[0, 0.5, 2], [3, 0.5, 2], [3, 0, 2]]
    assert listed(model.extremum_adjoint(ties, weights, "min")) == [[6, 0, 2], [0, 0, 2], [0, 1, 2]]
    assert {found.dtype for found in model.extremum_adjoint(ties, weights, "max")} == {np.dtype("float32")}


def dot(left: Sequence[Sequence[Array]], right: Sequence[Sequence[Array]]) -> float:
    """The inner product over all members and arrays."""
    return sum(float(np.sum(a * b)) for ours, theirs in zip(left, right, strict=True) for a, b in zip(ours, theirs, strict=True))


def promised(found: Array | list[Array] | None, weights: list[Array]) -> list[Array]:
    """A member's outputs as a list, with zeros where it is promised nothing."""
    if isinstance(found, list):
        return found or [np.zeros_like(weight) for weight in weights]
    return [np.zeros_like(weights[0]) if found is None else found]


@given(st.tuples(st.sampled_from(COMBINATIONS), SIZES).flatmap(lambda drawn: derivatives(*drawn[0], drawn[1])))
def test_adjoints_by_definition(derivative: Derivative) -> None:
    """For any inputs x and weights w, the inner product of w with the outputs is that of the adjoint of w with x.

    That holds for extrema, too, as they grow with their inputs in proportion; means and parts of extrema are rounded.
    """
    derivative = replace(derivative, case=replace(derivative.case, dtype="float64"))
    case = derivative.case
    members = range(len(case.group))
    inputs = [[array.astype(np.float64) for array in inputs_of(case, member)] for member in members]
    weights = [weights_of(derivative, member)[0] for member in members]
    outputs = [promised(found, given) for found, given in zip(received(case, inputs), weights, strict=True)]
    rounding = 1e-9 if case.op in ("avg", "min", "max") else 0.0
    assert abs(dot(weights, outputs) - dot(adjoint(case, weights), inputs)) <= rounding
