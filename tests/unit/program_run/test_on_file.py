"""What is on file of tensor programs."""

from __future__ import annotations

import pytest

from equivcheck.oracle.tensor_program import check_program
from equivcheck.program_run.facts import facts_of
from equivcheck.program_run.on_file import ON_FILE
from equivcheck.tensor_program import Constant, Contents, Leaf, Operation, Redistribution, TensorProgram
from equivcheck.tensor_program.operations.registry import OPERATIONS
from equivcheck.torch_version import torch_in
from equivcheck.verdict.verdict import Outcome


def program(leaf: Leaf, *rest: Constant | Leaf | Operation | Redistribution, mesh: tuple[int, ...] = (2,)) -> TensorProgram:
    """Some statements after a leaf."""
    return TensorProgram(mesh=mesh, statements=(leaf, *rest))


SHOWN_BY = {
    "dtensor_mean_of_counted_rows": program(
        Leaf(shape=(6, 2, 2), placements=("S(0)",)),
        Constant(shape=(6, 2), placements=("R",), contents=Contents.INDICES, high=2, seed=2),
        Operation(name="cross_entropy_ignoring_mean", arguments=(2, 1)),
    ),
    "dtensor_extreme_of_empty_shard": program(Leaf(shape=(1,), placements=("S(0)",)), Operation(name="max_all")),
    "dtensor_position_of_extreme": program(Leaf(shape=(2, 1), placements=("S(0)",)), Operation(name="argmax", dim=-2)),
    "dtensor_view_of_uneven_parts": program(
        Leaf(shape=(3, 2), placements=("S(0)", "S(0)")), Operation(name="einsum_trace"), mesh=(1, 2)
    ),
    "dtensor_endless_view": program(Leaf(shape=(1, 0, 1), placements=("R",)), Operation(name="reshape_heads"), mesh=(1,)),
    "dtensor_transpose_of_scalar": program(Leaf(shape=(), placements=("R",)), Operation(name="ravel_transposed"), mesh=(1,)),
    "dtensor_logsumexp_of_scalar": program(Leaf(shape=(), placements=("R",)), Operation(name="logsumexp"), mesh=(1,)),
    "dtensor_group_norm_of_no_elements": program(
        Leaf(shape=(1, 0), placements=("R",)),
        Leaf(shape=(0,), placements=("R",)),
        Operation(name="group_norm_weight", arguments=(2, 1)),
        mesh=(1,),
    ),
    "dtensor_vector_times_no_rows": program(
        Leaf(shape=(0, 1), placements=("R",)),
        Leaf(shape=(0,), placements=("R",)),
        Operation(name="vecmat", arguments=(2, 1)),
        mesh=(1,),
    ),
    "dtensor_index_add_backward": program(
        Leaf(shape=(1,), placements=("S(0)",)),
        Constant(shape=(), placements=("R",), contents=Contents.INDICES),
        Operation(name="index_add_own", arguments=(2, 1)),
    ),
    "dtensor_bits_of_mean": program(
        Leaf(shape=(), placements=("R",)),
        Leaf(shape=(2,), placements=("S(0)",)),
        Operation(name="l1_loss_mean", arguments=(2, 1)),
        Operation(name="real_view"),
    ),
}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_program_that_shows_it_is_known(name: str) -> None:
    """By the entry of that name, where its range has the installed torch."""
    (known,) = (each for each in ON_FILE if each.id == name)
    verdict = check_program(SHOWN_BY[name], deadline=10.0)
    if torch_in(known.torch):
        assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, name), verdict.reason
        assert known.could_show(SHOWN_BY[name])


def test_entries_name_what_there_is() -> None:
    """Each has an identifier of its own, and operations that exist."""
    assert len({each.id for each in ON_FILE}) == len(ON_FILE)
    for each in ON_FILE:
        assert each.operations
        assert set(each.operations) <= OPERATIONS.keys(), each.id


def test_a_view_that_never_ends_is_known_by_its_stack() -> None:
    """Ranks compute without an end, and are given up."""
    endless = program(Leaf(shape=(3, 0, 2), placements=("R",)), Operation(name="view_split_2"), mesh=(1,))
    verdict = check_program(endless, deadline=1.0)
    assert "no elements" in facts_of(endless)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, "dtensor_endless_view")


def test_an_error_that_is_not_on_file_is_a_finding() -> None:
    """The same text, of an operation that no entry has."""
    known = next(each for each in ON_FILE if each.id == "dtensor_logsumexp_of_scalar")
    verdict = check_program(SHOWN_BY[known.id])
    other = program(Leaf(shape=(), placements=("R",)), Operation(name="exp"), mesh=(1,))
    assert not known.could_show(other)
    assert known.explains(SHOWN_BY[known.id], verdict) == torch_in(known.torch)
    assert not known.explains(other, verdict)
