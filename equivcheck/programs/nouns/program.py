"""A tensor program: a few statements on a mesh, which ranks run on DTensors and one device on plain tensors."""

from __future__ import annotations

import math
from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import require_placements
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between
from equivcheck.scenario.scenario import count, describe_case
from equivcheck.system.choice import PrintableEnum

MAX_ELEMENTS = 4096
"""Maximum elements in a value. Programs test placements, and few elements show errors as well as many."""


class Contents(PrintableEnum):
    """Values in a constant, such as indices or a mask."""

    INDICES = "indices"
    """Integers from 0 to below `high`, with repetitions."""
    ORDER = "order"
    """Integers from 0 to below `high`, distinct along the last dim."""
    MASK = "mask"
    """Booleans."""
    WEIGHTS = "weights"
    """Positive numbers."""


def _require_shape(owner: object, shape: tuple[int, ...]) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise invalid_field(owner, "shape", f"sizes of at least 0, at most {MAX_ELEMENTS} elements")


@frozen_dataclass
class Leaf:
    """Input with a gradient in a tensor program: a float64 tensor with distinct values."""

    tag: ClassVar[str] = "leaf"
    shape: tuple[int, ...]
    """Full tensor's shape."""
    placements: tuple[str, ...]
    """Placement for each mesh axis."""
    seed: int = 0
    """Seed for the values, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        _require_shape(self, self.shape)
        require_placements(self, self.placements, len(self.shape))
        require_between(self, "seed", 0, 2**32 - 1)


@frozen_dataclass
class Constant:
    """Input without a gradient in a tensor program: indices, targets, masks, weights."""

    tag: ClassVar[str] = "constant"
    shape: tuple[int, ...]
    """Full tensor's shape."""
    placements: tuple[str, ...]
    """Placement for each mesh axis: replicated or sharded."""
    contents: Contents
    """Values in the tensor, such as indices or a mask."""
    high: int = 1
    """Exclusive upper bound for integer values, at least 1."""
    seed: int = 0
    """Seed for the values, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        _require_shape(self, self.shape)
        require_placements(self, self.placements, len(self.shape))
        require_between(self, "seed", 0, 2**32 - 1)
        require_between(self, "high", 1, MAX_ELEMENTS)
        if any(placement.startswith("P") for placement in self.placements):
            raise invalid_field(self, "placements", "only R or S(dim), because only leaves of a program can be partial")
        if self.contents is Contents.ORDER and self.shape and self.shape[-1] > self.high:
            raise invalid_field(
                self, "high", f"at least {self.shape[-1]}, so that the numbers along the last dim can be distinct"
            )


@frozen_dataclass
class Operation:
    """Statement that calls a torch operation.

    If torch raises on one device, or the result cannot be compared, the statement clones its first argument instead.
    """

    tag: ClassVar[str] = "operation"
    name: str
    """A name in `OPERATIONS`."""
    arguments: tuple[int, ...] = (1,)
    """For each argument, how many statements back its value was computed; 1 is the previous statement."""
    dim: int = 0
    """Dim passed to the operation, counted from the end if negative; 0 if the operation takes no dim."""
    output: int = 0
    """Index of the result used by later statements. Other results are compared, but do not contribute to gradients."""

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            raise invalid_field(self, "name", f"one of the {len(OPERATIONS)} names in OPERATIONS")
        operation = OPERATIONS[self.name]
        if len(self.arguments) != operation.num_arguments:
            raise invalid_field(self, "arguments", f"{operation.num_arguments} arguments for {self.name}")
        if self.dim and not operation.takes_dim:
            raise invalid_field(self, "dim", f"0, because {self.name} takes no dim")
        require_between(self, "dim", -9, 9)
        require_between(self, "output", 0, 9)


@frozen_dataclass
class Redistribution:
    """Statement that changes a value's placements. If the value has no dim to be sharded, it is cloned instead."""

    tag: ClassVar[str] = "redistribution"
    placements: tuple[str, ...]
    """New placement for each mesh axis."""
    argument: int = 1
    """How many statements back the value was computed; 1 is the previous statement."""

    def __post_init__(self) -> None:
        require_placements(self, self.placements)


@frozen_dataclass
class RoundTrip:
    """Statement that calls `to_local` and then `from_local` with the same placements and shape."""

    tag: ClassVar[str] = "round_trip"
    argument: int = 1
    """How many statements back the value was computed; 1 is the previous statement."""


Statement = Leaf | Constant | Operation | Redistribution | RoundTrip


def arguments_of(statement: Statement) -> tuple[int, ...]:
    """Return the distance from a statement back to each of its arguments. 1 stands for the previous statement.

    Leaves and constants have no arguments.
    """
    if isinstance(statement, Operation):
        return statement.arguments
    return (statement.argument,) if isinstance(statement, (Redistribution, RoundTrip)) else ()


MAX_STATEMENTS = 40
"""Maximum statements in a program, because each may communicate."""
MAX_RANKS = 64
"""Maximum ranks in a mesh."""


@frozen_dataclass
class TensorProgram:
    """A few torch operations, run on DTensors on ranks and on plain tensors on one device. All values and gradients are compared.

    Each statement computes a value, and every rank gathers it as a full tensor. The backward pass starts from a weighted sum over
    all values that no other statement takes.
    """

    tag: ClassVar[str] = "tensor_program"
    mesh: tuple[int, ...]
    """Sizes for 1 to 3 mesh axes, outermost first."""
    statements: tuple[Statement, ...]
    """1 to 40 statements. The first one is a leaf."""
    schedule_seed: int = 0
    """Seed for the order in which simulated ranks run, 0 to 2**32 - 1; 0 runs the lowest rank first."""

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
            raise InvalidScenario(f"{where} is not valid: an argument refers {wrong} statements back. Expected 1 to {number}")

    @property
    def num_ranks(self) -> int:
        """Mesh size, in ranks."""
        return math.prod(self.mesh)

    @property
    def name(self) -> str:
        """Name for reports. It is equal for all tensor programs, so reports also name the operation that fails."""
        return self.tag

    @property
    def summary_row(self) -> tuple[str]:
        """Row for this program in coverage tables. All tensor programs are counted in the same row."""
        return (self.tag,)

    @property
    def operations(self) -> tuple[str, ...]:
        """Operation names, in the program's order."""
        return tuple(each.name for each in self.statements if isinstance(each, Operation))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Axis names for the mesh: ``axis0``, ``axis1``, ``axis2``."""
        return tuple(f"axis{number}" for number in range(len(self.mesh)))

    def sinks(self) -> tuple[int, ...]:
        """Return the numbers of all statements whose value no other statement takes, in ascending order.

        The backward pass starts from a weighted sum over these values.
        """
        taken = {number - back for number, each in enumerate(self.statements) for back in arguments_of(each)}
        return tuple(number for number in range(len(self.statements)) if number not in taken)


@describe_case.register
def _(program: TensorProgram) -> str:
    ranks = count(program.num_ranks, "rank") if len(program.mesh) == 1 else f"a mesh of {' x '.join(map(str, program.mesh))}"
    operations = ", ".join(program.operations) or "no operation"
    return f"tensor program on {ranks}, {count(len(program.statements), 'statement')}: {operations}"
