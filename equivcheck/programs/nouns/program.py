"""A tensor program: a few statements on a mesh, which ranks run on DTensors and one device on plain tensors."""

from __future__ import annotations

import math
from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.programs.nouns.statements import Constant, Leaf, Operation, Redistribution, Statement, arguments_of
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between
from equivcheck.scenario.scenario import count, describe_case

MAX_STATEMENTS = 40
"""Maximum statements in a program, because each may communicate."""
MAX_RANKS = 64
"""Maximum ranks in a mesh."""


@frozen_dataclass
class TensorProgram:
    """Statements ranks run on DTensors and one device on plain tensors. All values and gradients are compared.

    Every rank reads every value. The backward pass differentiates a weighted sum of the values that no statement takes.
    """

    tag: ClassVar[str] = "tensor_program"
    mesh: tuple[int, ...]
    """Sizes for 1 to 3 axes, outermost first."""
    statements: tuple[Statement, ...]
    """1 to 40 statements. The first is a leaf."""
    schedule_seed: int = 0
    """Seeds the order in which simulated ranks run, 0 to 2**32 - 1; 0 runs the lowest rank first."""

    def __post_init__(self) -> None:
        if not (1 <= len(self.mesh) <= 3 and all(size >= 1 for size in self.mesh) and self.num_ranks <= MAX_RANKS):
            raise invalid_field(self, "mesh", f"1 to 3 sizes of at least 1, for at most {MAX_RANKS} ranks")
        if not (1 <= len(self.statements) <= MAX_STATEMENTS and isinstance(self.statements[0], Leaf)):
            found, expected = f"{len(self.statements)} statements", f"1 to {MAX_STATEMENTS}, the first a leaf"
            raise InvalidScenario(f"TensorProgram.statements is not valid: it has {found}. Expected {expected}")
        require_between(self, "schedule_seed", 0, 2**32 - 1)
        for number, statement in enumerate(self.statements):
            self._require_fit(number, statement)

    def _require_fit(self, number: int, statement: Statement) -> None:
        where = f"TensorProgram.statements[{number}]"
        if isinstance(statement, (Leaf, Constant, Redistribution)) and len(statement.placements) != len(self.mesh):
            found = f"{len(statement.placements)} placements"
            raise InvalidScenario(f"{where} is not valid: it has {found}. Expected {len(self.mesh)}, one per mesh axis")
        wrong = next((distance for distance in arguments_of(statement) if not 1 <= distance <= number), None)
        if wrong is not None:
            raise InvalidScenario(f"{where} is not valid: it takes the value {wrong} back. Expected 1 to {number}")

    @property
    def num_ranks(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.mesh)

    @property
    def name(self) -> str:
        """Name for reports. It is the same for all tensor programs, because failures are named by their operation."""
        return self.tag

    @property
    def summary_row(self) -> tuple[str]:
        """Keys under which coverage counts the program: the same for all programs."""
        return (self.tag,)

    @property
    def operations(self) -> tuple[str, ...]:
        """Operation names, in order."""
        return tuple(each.name for each in self.statements if isinstance(each, Operation))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Mesh axis names."""
        return tuple(f"axis{number}" for number in range(len(self.mesh)))

    def sinks(self) -> tuple[int, ...]:
        """Statements whose values no other statement takes, in order. The backward pass starts from their weighted sum."""
        taken = {number - back for number, each in enumerate(self.statements) for back in arguments_of(each)}
        return tuple(number for number in range(len(self.statements)) if number not in taken)


@describe_case.register
def _(program: TensorProgram) -> str:
    ranks = count(program.num_ranks, "rank") if len(program.mesh) == 1 else f"a mesh of {' x '.join(map(str, program.mesh))}"
    operations = ", ".join(program.operations) or "no operation"
    return f"tensor program on {ranks}, {count(len(program.statements), 'statement')}: {operations}"
