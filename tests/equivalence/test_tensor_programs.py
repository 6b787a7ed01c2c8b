"""Tensor programs on DTensors against one device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from equivcheck import check
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, RoundTrip, TensorProgram
from equivcheck.programs.nouns.operations.operation import ArgumentKind
from equivcheck.programs.nouns.operations.registry import FAMILIES
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.strategies import programs
from equivcheck.worlds.trace.differences import Difference

DIFFERING = {name for known in ON_FILE if known.phases for name in known.operations}
PLAIN = tuple(
    facts.name
    for family in ("elementwise", "making")
    for facts in FAMILIES[family]
    if facts.name not in {*DIFFERING, "iadd", "set_data"} and not facts.name.endswith("_")
    if all(argument.kind is ArgumentKind.LEAF for argument in facts.arguments[:1]) and len(facts.arguments) < 2
)
"""Operations without side effects for which no difference is known."""


@settings(max_examples=15, deadline=None)
@given(programs(operations=PLAIN, max_ranks=3))
def test_operations_without_known_differences_agree(program: TensorProgram) -> None:
    """Programs of them leave what one device computes, or are refused by all ranks alike."""
    check(program).assert_no_finding()


def leaf(*placements: str, shape: tuple[int, ...] = (5, 3), seed: int = 0) -> Leaf:
    """A leaf of 5 x 3."""
    return Leaf(shape=shape, placements=placements, seed=seed)


RIGHT = {
    "softmax over a cut dim": TensorProgram(
        mesh=(2,), statements=(leaf("S(0)"), Operation(name="softmax", dim=0), Operation(name="square"))
    ),
    "a product of addends and parts": TensorProgram(
        mesh=(2,),
        statements=(leaf("P(sum)"), leaf("S(0)", shape=(3, 5), seed=1), Operation(name="mm", arguments=(2, 1))),
    ),
    "through the local tensor": TensorProgram(
        mesh=(2, 2),
        statements=(leaf("P(avg)", "S(1)"), RoundTrip(), Redistribution(placements=("S(0)", "S(0)")), Operation(name="exp")),
    ),
    "a dim cut twice, unevenly": TensorProgram(
        mesh=(2, 2), statements=(leaf("S(0)", "S(0)"), Operation(name="mul_scalar"), Operation(name="sum_dim"))
    ),
    "an embedding of cut rows": TensorProgram(
        mesh=(2,),
        statements=(
            leaf("S(0)"),
            Constant(shape=(3,), placements=("R",), contents=Contents.INDICES, high=5),
            Operation(name="embedding", arguments=(2, 1)),
        ),
    ),
    "no elements": TensorProgram(mesh=(2,), statements=(leaf("S(0)", shape=(0, 3)), Operation(name="sum_dim"))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_equivalent(name: str) -> None:
    """With nothing refused, and no statement replaced by a clone."""
    verdict = check_program(RIGHT[name])
    verdict.assert_equivalent()
    assert verdict.refusals == ()
    assert verdict.clones == ()


def test_processes_agree_with_threads() -> None:
    """The same program has the same outcome on gloo."""
    program = RIGHT["a product of addends and parts"]
    assert check(program, world="gloo").outcome is Outcome.EQUIVALENT


def test_a_refusal_is_counted_and_the_program_goes_on() -> None:
    """What every rank refuses is a constant from then on, and what follows is compared."""
    program = TensorProgram(mesh=(2,), statements=(leaf("R"), Redistribution(placements=("P(sum)",)), Operation(name="exp")))
    verdict: ProgramVerdict = check(program)
    verdict.assert_equivalent()
    assert [each.statement for each in verdict.refusals] == [1]


@pytest.mark.torch("<2.14", "later versions scan as one device does")
def test_what_differs_is_said_with_what_follows() -> None:
    """A negative dim: the value differs, and what is computed from it; on file, it is no finding."""
    statements = (leaf("S(0)"), Operation(name="cumsum", dim=-2), Operation(name="exp"))
    verdict = check_program(TensorProgram(mesh=(2,), statements=statements))
    assert verdict.outcome is Outcome.KNOWN
    assert verdict.known == "dtensor_scan_along_negative_dim"
    assert verdict.divergence is not None
    assert (verdict.divergence.tensor, verdict.divergence.difference) == ("v1 cumsum", Difference.VALUE)
    assert "step 0 value v2 exp" in verdict.followers


def test_ranks_that_disagree_are_seen() -> None:
    """`item` of addends gives each rank its own."""
    verdict = check_program(TensorProgram(mesh=(2,), statements=(leaf("S(0)"), Operation(name="item"))))
    assert verdict.divergence is not None
    assert verdict.divergence.difference is Difference.RANKS_DISAGREE
