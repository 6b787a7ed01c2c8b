"""Tensor programs one change simpler than another."""

from __future__ import annotations

from hypothesis import given, settings

from equivcheck.campaign.findings.size import size_of
from equivcheck.campaign.shrinking.programs import PROGRAM_CHANGES
from equivcheck.campaign.shrinking.search import Shrinking
from equivcheck.campaign.shrinking.simpler import simpler_by
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.strategies import programs

LONG = TensorProgram(
    mesh=(2, 3),
    statements=(
        Leaf(shape=(4, 6), placements=("S(0)", "P(sum)"), seed=3),
        Operation(name="exp"),
        Redistribution(placements=("R", "S(1)")),
        Leaf(shape=(3, 6), placements=("R", "S(0)")),
        Constant(shape=(2,), placements=("R", "R"), contents=Contents.INDICES, high=4),
        Operation(name="index_select", arguments=(3, 1)),
        Operation(name="softmax", arguments=(4,), dim=-1),
        Operation(name="square", arguments=(1,)),
    ),
    schedule_seed=5,
)


@settings(max_examples=30)
@given(programs())
def test_every_change_is_a_smaller_program(program: TensorProgram) -> None:
    """What comes out can be constructed, and differs."""
    for each in PROGRAM_CHANGES:
        for simpler in simpler_by(each, program):
            assert size_of(simpler) < size_of(program)


def shrunk(program: TensorProgram, is_wrong: object) -> TensorProgram:
    """The smallest program that the passes alone find with the same fault."""

    def judge(case: TensorProgram, *, coarse: bool) -> ProgramVerdict:
        outcome = Outcome.DIVERGED if is_wrong(case) else Outcome.EQUIVALENT  # type: ignore[operator]
        return ProgramVerdict(outcome=outcome, world="sim", program=case)

    search = Shrinking(judge(program, coarse=False), judge, same=lambda each: each.outcome is Outcome.DIVERGED, seconds=60.0)
    found = search.finish().case
    assert isinstance(found, TensorProgram)
    return found


def test_an_operation_is_left_alone_with_a_leaf_of_one_element() -> None:
    """Statements, an axis, ranks, sizes, placements and settings go where the fault needs none of them."""
    found = shrunk(LONG, lambda case: "softmax" in case.operations)
    assert found == TensorProgram(mesh=(1,), statements=(Leaf(shape=(), placements=("R",)), Operation(name="softmax")))


def test_what_the_fault_needs_stays() -> None:
    """A cut dim of at least 3 elements on two ranks, a negative dim, and a second operation that reads the first."""

    def is_wrong(case: TensorProgram) -> bool:
        first = case.statements[0]
        assert isinstance(first, Leaf)
        last = case.statements[-1]
        return (
            case.num_ranks >= 2
            and case.operations[-2:] == ("softmax", "square")
            and isinstance(last, Operation)
            and case.statements[-1 - last.arguments[0]] == Operation(name="softmax", dim=-1)
            and any("S(0)" in each.placements and max(each.shape) >= 3 for each in case.statements if isinstance(each, Leaf))
        )

    found = shrunk(LONG, is_wrong)
    assert is_wrong(found)
    assert found.statements == (
        Leaf(shape=(3,), placements=("S(0)",)),
        Operation(name="softmax", dim=-1),
        Operation(name="square"),
    )
    assert found.mesh == (2,)


def test_a_value_becomes_a_leaf() -> None:
    """What is computed before the fault is no part of it."""
    found = shrunk(LONG, lambda case: "index_select" in case.operations)
    assert [type(each) for each in found.statements] == [Leaf, Constant, Operation]
