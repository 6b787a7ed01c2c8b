"""The gradient of a differentiable collective is the adjoint that the NumPy model computes, in sim and over gloo."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from collectives.cases import Kind, inputs_of
from collectives.differences import DIFFERENCES, UNEVEN, WRITES_WHAT_IS_SAVED, Difference, weights
from collectives.gradient_programs import (
    OPERATORS,
    OPERATORS_SINCE,
    differentiate,
    differentiate_all_gather_base,
    differentiate_operator,
    differentiate_or_raise,
    unpack_saved_maximum,
)
from collectives.gradients import COMBINATIONS, Derivative, Form, derivative_batches, expected_gradients, weights_of, works_in
from collectives.judge import assert_received
from collectives.model import Array
from collectives.programs import Result
from collectives.worlds import WORLDS, run_in
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.failure import RanksFailed

EXAMPLES = max(5, settings().max_examples // 20)
"""Batches of up to eight calls, for each kind of each form."""


@pytest.mark.parametrize(("form", "kind"), COMBINATIONS)
def test_gradients(form: Form, kind: Kind) -> None:
    """Values and gradients of every member are the model's; whole numbers, so exactly."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(derivative_batches(form, kind))
    def agree(batch: tuple[int, tuple[Derivative, ...]]) -> None:
        size, derivatives = batch
        for world in WORLDS:
            here = [derivative for derivative in derivatives if works_in(derivative, world)]
            by_rank = run_in(world, size, differentiate, here)
            for derivative, pairs in zip(here, zip(*by_rank, strict=True), strict=True):
                assert_differentiated(derivative, pairs)
                assert_transposed(derivative, pairs)

    agree()


def assert_transposed(derivative: Derivative, pairs: Sequence[tuple[Result, Result] | None]) -> None:
    """The inner product of outputs and their gradients, over all members, is that of inputs and theirs; by torch's numbers alone.

    Of two tensors that go in, the second is twice the first, and so is what comes out.
    """
    case, forward, backward = derivative.case, 0.0, 0.0
    for member, rank in enumerate(case.group):
        values, gradients = pairs[rank] or (Result(), Result())
        forward += sum(
            dot(values.outputs, [(index + 1) * array for array in weights])
            for index, weights in enumerate(weights_of(derivative, member))
            if member == case.root or case.kind not in (Kind.GATHER, Kind.REDUCE)
        )
        backward += dot(inputs_of(case, member), gradients.outputs)
    assert np.isclose(forward, backward, rtol=1e-4, atol=1e-4), f"{forward} forward, {backward} backward in {derivative}"


def dot(left: Sequence[Array], right: Sequence[Array]) -> float:
    """The inner product of as many arrays."""
    return sum(float(np.sum(one * other, dtype=np.float64)) for one, other in zip(left, right, strict=True))


def assert_differentiated(derivative: Derivative, pairs: Sequence[tuple[Result, Result] | None]) -> None:
    """`pairs` are by global rank."""
    assert_received(derivative.case, [pair and pair[0] for pair in pairs])
    expected = expected_gradients(derivative)
    for rank, pair in enumerate(pairs):
        assert (pair is not None) == (rank in derivative.case.group)
        if pair is None:
            continue
        assert not pair[1].error, f"rank {rank} raised {pair[1].error} in the backward of {derivative}"
        wanted = expected[derivative.case.group.index(rank)]
        assert len(pair[1].outputs) == len(wanted)
        for found, array in zip(pair[1].outputs, wanted, strict=True):
            assert found.shape == array.shape, f"rank {rank} of {derivative}"
            assert np.array_equal(found, array), f"rank {rank} of {derivative}: {found} instead of {array}"


@pytest.mark.parametrize(
    ("difference", "world"),
    [(each, world) for each in DIFFERENCES if is_torch_in(each.torch) for world in each.worlds],
    ids=lambda value: getattr(value, "name", value),
)
def test_gradients_that_are_not_the_adjoint(difference: Difference, world: str) -> None:
    """Each is what the table says: another definition, an error on every rank, or wrong numbers; if not, torch mended it."""
    derivative = difference.derivative
    pairs = [values[0] for values in run_in(world, 3, differentiate, [derivative])]
    for member, rank in enumerate(derivative.case.group):
        values, gradients = pairs[rank]
        error = values.error or gradients.error
        if difference.gradients is None or (difference.text and error):
            assert re.search(difference.text, error), (values, gradients)
            continue
        for found, array in zip(gradients.outputs, difference.gradients(weights(derivative))[member], strict=True):
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("difference", [each for each in DIFFERENCES if each.gradients], ids=lambda difference: difference.name)
def test_differences_differ(difference: Difference) -> None:
    """The table holds nothing that is the adjoint: of sums, means and moves; the other reductions are not even linear."""
    if difference.derivative.case.op not in ("max", "min", "product"):
        adjoint = expected_gradients(difference.derivative)
        found = difference.gradients(weights(difference.derivative))
        assert not all(
            np.array_equal(one, other)
            for ours, theirs in zip(found, adjoint, strict=True)
            for one, other in zip(ours, theirs, strict=True)
        )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("derivative", UNEVEN, ids=lambda derivative: derivative.case.kind.value)
def test_uneven_parts_end_the_run(derivative: Derivative, world: str) -> None:
    """Where torch cannot exchange them there is an error, ours or its own, whichever rank is first; the world works on."""
    with pytest.raises(RanksFailed, match=r"collectives do not match|are not valid for gloo|invalid tensor size"):
        run_in(world, 2, differentiate_or_raise, derivative)


@pytest.mark.parametrize("world", WORLDS)
def test_a_gather_into_one_tensor_has_no_gradient(world: str) -> None:
    """``nn._all_gather_base`` raises in its backward but over NCCL."""
    assert run_in(world, 2, differentiate_all_gather_base) == ("Backend not supported!",) * 2


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", [name for name in OPERATORS if is_torch_in(OPERATORS_SINCE.get(name, ""))])
def test_operators_without_a_backward(name: str, world: str) -> None:
    """They leave gradients where they are, or have none; no function that has a backward relies on theirs."""
    found = run_in(world, 2, differentiate_operator, name)
    assert found in (([2.0, 2.0], [1.0, 1.0]), (None, None)), name


@pytest.mark.skipif(
    not is_torch_in(WRITES_WHAT_IS_SAVED), reason=f"torch {WRITES_WHAT_IS_SAVED} saves what a coalesced maximum gives"
)
@pytest.mark.parametrize(("world", "text"), [("sim", ""), ("gloo", "modified by an inplace operation")])
def test_gloo_writes_what_a_coalesced_maximum_has_saved(world: str, text: str) -> None:
    """Over gloo the backward raises on a rank that came before the other did; in sim nothing has changed."""
    assert re.search(text or "^$", run_in(world, 2, unpack_saved_maximum)[0])
