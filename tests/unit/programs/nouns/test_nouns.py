"""Tensor programs as values: JSON, repr, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from equivcheck.errors import InvalidScenario
from equivcheck.programs import nouns
from equivcheck.programs.nouns import Constant, Contents, Leaf, Operation, Redistribution, RoundTrip, TensorProgram
from equivcheck.programs.nouns.file_format import program_from_json, program_to_json
from equivcheck.strategies import programs

EXAMPLE = TensorProgram(
    mesh=(2, 1),
    statements=(
        Leaf(shape=(4, 3), placements=("S(0)", "P(sum)"), seed=5),
        Constant(shape=(2,), placements=("R", "S(0)"), contents=Contents.INDICES, high=4),
        Operation(name="index_select", arguments=(2, 1), dim=-2),
        Redistribution(placements=("R", "S(1)")),
        RoundTrip(argument=2),
    ),
    schedule_seed=3,
)


@given(programs())
def test_json_goes_both_ways(program: TensorProgram) -> None:
    """A written program is read as an equal one."""
    assert program_from_json(program_to_json(program)) == program


@given(programs())
def test_a_program_prints_as_code(program: TensorProgram) -> None:
    """A repr evaluates to an equal program."""
    assert eval(repr(program), vars(nouns).copy()) == program


def test_json_keeps_every_kind_of_statement() -> None:
    """Statements carry their kind, and the program its own."""
    text = program_to_json(EXAMPLE)
    assert program_from_json(text) == EXAMPLE
    kinds = ("tensor_program", "leaf", "constant", "operation", "redistribution", "round_trip")
    assert all(f'"kind": "{kind}"' in text for kind in kinds)


def test_repr_leaves_out_defaults() -> None:
    """The repr of a leaf with seed 0 has no seed."""
    assert repr(Leaf(shape=(1,), placements=("R",))) == "Leaf(shape=(1,), placements=('R',))"


def test_sinks_are_what_no_statement_takes() -> None:
    """A value that another takes is no sink."""
    assert EXAMPLE.sinks() == (3, 4)


LEAF = Leaf(shape=(2,), placements=("R",))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no placement": (lambda: Leaf(shape=(2,), placements=("S0",)), "Expected R, S"),
    "a dim that is not there": (lambda: Leaf(shape=(2,), placements=("S(1)",)), "has 1 dims"),
    "addends of a constant": (
        lambda: Constant(shape=(2,), placements=("P(sum)",), contents=Contents.MASK),
        r"only R or S\(dim\)",
    ),
    "fewer numbers than are to be distinct": (
        lambda: Constant(shape=(3,), placements=("R",), contents=Contents.ORDER, high=2),
        "at least 3",
    ),
    "an unknown operation": (lambda: Operation(name="nope"), "one of the"),
    "too few arguments": (lambda: Operation(name="add"), "2 arguments"),
    "a dim where none is taken": (lambda: Operation(name="sum", dim=1), "takes no dim"),
    "no leaf first": (lambda: TensorProgram(mesh=(2,), statements=(RoundTrip(),)), "first a leaf"),
    "a value before the first": (
        lambda: TensorProgram(mesh=(2,), statements=(LEAF, RoundTrip(argument=2))),
        r"an argument refers 2 statements back. Expected 1 to 1",
    ),
    "placements of another mesh": (lambda: TensorProgram(mesh=(2, 2), statements=(LEAF,)), "1 placements. Expected 2"),
    "no rank": (lambda: TensorProgram(mesh=(0,), statements=(LEAF,)), "sizes of at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_out_of_range_is_refused(name: str) -> None:
    """In one line with the expected form."""
    make, message = REFUSED[name]
    with pytest.raises(InvalidScenario, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_json_of_another_kind_is_refused() -> None:
    """A scenario is no program."""
    with pytest.raises(InvalidScenario, match="not a tensor program of format 1"):
        program_from_json('{"kind": "scenario", "format": 2}')
