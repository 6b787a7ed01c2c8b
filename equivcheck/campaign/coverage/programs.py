"""Counts operations in tensor programs, with the placements of their arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import sharded_dim
from equivcheck.programs.nouns.program import Constant, Leaf, Operation, Redistribution, Statement, TensorProgram
from equivcheck.programs.verdict import ProgramVerdict

Place = tuple[str, int, str]
"""An operation, the index of an argument, and its placement:
``S``, ``P(sum)``, or ``R S`` on two axes; ``value`` if it is computed."""


class ProgramReach:
    """The operations in checked tensor programs, with their arguments' placements.

    The object is small enough to send between processes.
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self.places: set[Place] = set()
        self.refused: Counter[str] = Counter()
        """Statements refused by all ranks, per operation."""

    def add(self, program: TensorProgram, *, leaving_out: tuple[int, ...] = ()) -> None:
        """Count the operations in a program. `leaving_out` are indices of statements to skip."""
        self.num_programs += 1
        self.places.update(places_of(program, leaving_out=leaving_out))

    def add_checked(self, verdict: ProgramVerdict) -> None:
        """Count the operations in a checked program. Record separately which operations all ranks refused.

        Statements that did not apply to their arguments are left out.
        """
        self.add(verdict.program, leaving_out=verdict.clones)
        statements = verdict.program.statements
        refused = [statements[each.statement] for each in verdict.refusals if each.statement >= 0]
        self.refused.update(each.name for each in refused if isinstance(each, Operation))

    def gain(self, program: TensorProgram) -> int:
        """How many new placements a program would add. Placements are counted separately for each argument of each operation."""
        return len({*places_of(program)} - self.places)

    def merge(self, other: ProgramReach) -> None:
        """Add all counts of another object."""
        self.num_programs += other.num_programs
        self.places |= other.places
        self.refused.update(other.refused)

    @property
    def operations(self) -> frozenset[str]:
        """Names of the operations in counted programs."""
        return frozenset(operation for operation, _, _ in self.places)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the operations that no counted program had, in the order of `OPERATIONS`."""
        return tuple(name for name in OPERATIONS if name not in self.operations)


def places_of(program: TensorProgram, *, leaving_out: tuple[int, ...] = ()) -> Iterator[Place]:
    """Yield each argument of each operation in a program, with its placement. `leaving_out` are indices of statements to skip."""
    for number, statement in enumerate(program.statements):
        if isinstance(statement, Operation) and number not in leaving_out:
            for index, back in enumerate(statement.arguments):
                yield statement.name, index, _lies(program.statements[number - back])


def _lies(statement: Statement) -> str:
    if not isinstance(statement, (Leaf, Constant, Redistribution)):
        return "value"
    return " ".join("S" if sharded_dim(each) is not None else each for each in statement.placements)
