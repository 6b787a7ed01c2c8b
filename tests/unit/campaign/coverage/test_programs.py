"""Which operations tensor programs reach, and under which placements."""

from __future__ import annotations

from equivcheck.campaign.coverage.programs import ProgramReach, places_of
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.run.overloads import called_by

PROGRAM = TensorProgram(
    mesh=(2, 2),
    statements=(
        Leaf(shape=(4, 6), placements=("S(1)", "P(sum)")),
        Operation(name="exp"),
        Redistribution(placements=("R", "R")),
        Operation(name="add", arguments=(1, 2)),
    ),
)


def test_placements_are_those_of_what_an_argument_is() -> None:
    """Cut dims alike; what is computed lies as DTensor decides."""
    assert set(places_of(PROGRAM)) == {("exp", 0, "S P(sum)"), ("add", 0, "R R"), ("add", 1, "value")}


def test_reach_is_gained_once_and_added_up() -> None:
    """A program adds nothing the second time, nor what did not apply or is counted elsewhere."""
    one, other = ProgramReach(), ProgramReach()
    assert one.gain(PROGRAM) == 3
    one.add(PROGRAM, leaving_out=(1,))
    assert one.operations == {"add"}
    assert one.gain(PROGRAM) == 1
    other.add(PROGRAM)
    one.merge(other)
    assert (one.num_programs, one.gain(PROGRAM)) == (2, 0)
    assert "exp" not in one.missing
    assert "neg" in one.missing


def test_what_all_ranks_refuse_is_counted_by_operation() -> None:
    """Not that a redistribution was refused."""
    statements = (Leaf(shape=(2,), placements=("S(0)",)), Operation(name="nonzero"))
    reach = ProgramReach()
    reach.add_checked(check_program(TensorProgram(mesh=(2,), statements=statements)))
    assert reach.refused == {"nonzero": 1}


def test_overloads_are_those_of_both_passes() -> None:
    """Of softmax, forward and backward."""
    assert {"aten._softmax.default", "aten._softmax_backward_data.default"} <= called_by(OPERATIONS["softmax"])
