"""Without peers every collective gives tensors of the right shapes, for any rank of worlds of thousands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from collectives.cases import KINDS, ROOTED, Case, Kind, calls, numpy_dtype
from collectives.fakes import TRACED, in_fake_world, in_torchs_fake, trace
from collectives.gradient_programs import differentiate
from collectives.gradients import COMBINATIONS, Derivative, derivatives
from collectives.gradients import Form as Derived
from collectives.post_programs import deliver, meet, run_coalesced
from collectives.posts import COALESCED, Barrier, Coalesced, Form, coalesced, posts
from collectives.programs import run_batch

FAKES = {"torch": in_torchs_fake, "equivcheck": in_fake_world}
MAX_FAKE = 4096
EXAMPLES = max(10, settings().max_examples // 10)

SPREADABLE = [(form, kind) for form, kind in COMBINATIONS if form is not Derived.PERMUTE]
"""All but ``permute_tensor``, whose ranks have other numbers of rows; it issues the ``all_to_all_single`` that is among them."""

Fake = Callable[..., Any]


@st.composite
def places(draw: DrawFn, *, most: int = MAX_FAKE) -> tuple[int, int, tuple[int, ...]]:
    """A world's size, a rank, and a group that has it: every nth rank, as along an axis of a mesh."""
    size = draw(st.one_of(st.integers(1, 8), st.integers(1, most)))
    rank = draw(st.integers(0, size - 1))
    stride = draw(st.integers(1, 4))
    return size, rank, tuple(range(rank % stride, size, stride))


def spread(case: Case, group: tuple[int, ...], root: int) -> Case:
    """The call of one rank, issued in a large group."""
    return replace(case, group=group, rows=(), shape=case.shape or (1,), root=root % len(group) if case.kind in ROOTED else 0)


def assert_shapes(case: Case, rank: int, outputs: list[Any]) -> None:
    """A member's outputs are as many and as large as they should be."""
    member = case.group.index(rank)
    hidden = case.kind in (Kind.GATHER, Kind.REDUCE) and member != case.root
    assert [output.shape for output in outputs] == ([] if hidden else case.received_shapes(member)), case
    assert all(output.dtype == numpy_dtype(case.dtype) for output in outputs), case


@pytest.mark.parametrize("fake", FAKES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(places(), st.tuples(*(calls(kind, 1) for kind in KINDS)), st.integers(0, MAX_FAKE))
def test_shapes(fake: str, place: tuple[int, int, tuple[int, ...]], cases: tuple[Case, ...], root: int) -> None:
    """Every collective returns, blocking or not, and leaves tensors of the shapes that real peers would."""
    size, rank, group = place
    issued = [spread(case, group, root) for case in cases]
    for case, result in zip(issued, FAKES[fake](size, rank, run_batch, issued, False), strict=True):
        assert not result.error, f"{result.error} in {case}"
        assert_shapes(case, rank, result.outputs)


@pytest.mark.parametrize("fake", FAKES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(places(most=500), st.sampled_from(COALESCED).flatmap(lambda kind: coalesced(kind, 1)))
def test_coalesced_shapes(fake: str, place: tuple[int, int, tuple[int, ...]], drawn: Coalesced) -> None:
    """Calls behind one handle likewise."""
    size, rank, group = place
    call = replace(drawn, cases=tuple(spread(case, group, 0) for case in drawn.cases))
    for case, result in zip(call.cases, FAKES[fake](size, rank, run_coalesced, [call])[0], strict=True):
        assert not result.error, f"{result.error} in {call}"
        assert_shapes(case, rank, result.outputs)


@pytest.mark.parametrize("fake", FAKES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_messages(fake: str, data: st.DataObject) -> None:
    """Messages to and from peers that are not there neither wait nor change shape; a barrier does not wait."""
    size = data.draw(st.integers(2, 16))
    rank, post = data.draw(st.integers(0, size - 1)), data.draw(posts(data.draw(st.sampled_from(Form)), size))
    letters = FAKES[fake](size, rank, deliver, [post])[0]
    mine = [index for index, case in enumerate(post.messages) if case.group[post.receivers[index]] == rank]
    assert {index: letter.shape for index, letter in letters.items()} == {index: post.messages[index].shape for index in mine}
    ranks = post.messages[0].group
    assert (FAKES[fake](size, rank, meet, ranks, [0.0] * size, Barrier.ASYNCHRONOUS) is None) == (rank not in ranks)


@pytest.mark.parametrize("fake", FAKES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(places(most=200), st.tuples(*(derivatives(form, kind, 1) for form, kind in SPREADABLE)), st.integers(0, MAX_FAKE))
def test_gradient_shapes(fake: str, place: tuple[int, int, tuple[int, ...]], drawn: tuple[Derivative, ...], root: int) -> None:
    """Differentiable collectives return fresh tensors of the right shapes, and gradients shaped as what went in."""
    size, rank, _ = place
    group = tuple(range(size))
    issued = [replace(each, case=spread(each.case, group, root)) for each in drawn]
    for call, pair in zip(issued, FAKES[fake](size, rank, differentiate, issued), strict=True):
        values, gradients = pair
        assert not values.error + gradients.error, (values.error, gradients.error, call)
        assert_shapes(call.case, rank, values.outputs) if call.case.kind is not Kind.REDUCE else None
        parts = range(len(gradients.outputs))
        assert [gradient.shape for gradient in gradients.outputs] == [call.case.part_shape(rank, part) for part in parts]


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.parametrize("name", TRACED)
@settings(max_examples=5, deadline=None)
@given(places(), st.integers(1, 3), st.integers(0, 3))
def test_tracing(fake: str, name: str, place: tuple[int, int, tuple[int, ...]], rows: int, width: int) -> None:
    """A traced collective is its operator and then the wait for it, with the shape that all its ranks make."""
    size, rank, _ = place
    given_rows = rows * size if name in ("reduce_scatter_tensor", "all_to_all_single") else rows
    called, shape = FAKES[fake](size, rank, trace, name, (given_rows, width))
    assert called == [name, "wait_tensor"]
    grown = {"all_gather_into_tensor": rows * size, "reduce_scatter_tensor": rows}
    assert shape == (grown.get(name, given_rows), width)
