"""A known DTensor error. Operations and facts identify it, so one entry excludes few programs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.programs.nouns.program import Operation, Redistribution, Statement, TensorProgram, arguments_of
from equivcheck.programs.run.facts import facts_of
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Phase

BACKWARD = re.compile(r"(^|StatementFailed: )backward: ")
"""Name in place of an operation for errors and hangs in the backward pass."""
STATEMENT = re.compile(r"(?:^|StatementFailed: )v(\d+) ")
"""Number of the failing statement."""
FRAME = re.compile(r"^  File .*", re.MULTILINE)
"""Stack line with a function name."""
OPERATION = re.compile(r'^  File "<operation .*', re.MULTILINE)
"""Stack line inside an operation's function."""
SHOWING = ("wrong", "raises", "hangs")
"""Results on torch versions that have the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDifference:
    """A known DTensor error: DTensor computes wrong values, or fails without saying which placement is not supported."""

    id: str
    """Short unique name."""
    link: str
    """Link to the report, or "no report found", and a sentence about the error."""
    torch: str
    """torch versions with the error, as a PEP 440 specifier."""
    shows: Mapping[str, str]
    """For each torch version, the result of the smallest program with the error over gloo. Oldest version first.

    Each is one of `SHOWING`, or right, refused, "wrong otherwise" or "raises otherwise".
    """
    operations: tuple[str, ...] = ()
    """Operations, or statement kinds such as round trips, in which the error shows. Empty if `sources` or other evidence
    identifies it.
    """
    sources: tuple[str, ...] = ()
    """Operations whose result looks right but is wrong inside. The error shows in statements that use this result."""
    can_change_arguments: bool = False
    """Whether operations in `sources` also damage their arguments. Other statements with these arguments can then fail."""
    can_swap_gradients: bool = False
    """Whether a rank can receive the gradient for another tensor. Any gradient in the program can then be wrong."""
    facts: frozenset[str] = frozenset()
    """Facts about a program that must all hold; see `facts_of`."""
    any_of: frozenset[str] = frozenset()
    """Facts about a program; at least one must hold. Empty if none is needed."""
    phases: tuple[Phase, ...] = ()
    """Phases in which the first divergence may lie; empty if no value is wrong."""
    raises: str = ""
    """Regular expression for a rank's error, or for its stack if it never ends; empty if no rank raises."""

    def could_show(self, program: TensorProgram) -> bool:
        """Whether the program can show this error on the installed torch.

        It needs one of the error's `operations` or `sources`, all its `facts`, and one fact in `any_of`. Empty fields need
        nothing.
        """
        names, needed = set(map(_name, program.statements)), (*self.operations, *self.sources)
        if (needed and names.isdisjoint(needed)) or not is_torch_in(self.torch):
            return False
        found = facts_of(program)
        return self.facts <= found and not (self.any_of and self.any_of.isdisjoint(found))

    def explains(self, program: TensorProgram, verdict: Judgement) -> bool:
        """Whether this error explains the first failure in a verdict on the program.

        The failure must be in the result of one of the error's operations, or in a value or gradient that this operation can make
        wrong.
        """
        if verdict.divergence is not None:
            phase, tensor = verdict.divergence.phase, verdict.divergence.tensor
            shows_source = self._has_gradient_from_source if phase is Phase.GRADIENT else self._is_computed_from_source
            is_it = phase in self.phases and (self._named_in(tensor.partition(" ")[2]) or shows_source(program, tensor))
        else:
            is_it = bool(self.raises) and verdict.failure is not None and self._is_raised(program, verdict.failure)
        return is_it and self.could_show(program)

    def seen_on(self) -> tuple[str, ...]:
        """Return the tested torch versions with the error."""
        return tuple(version for version, found in self.shows.items() if found in SHOWING)

    def unseen_on(self) -> tuple[str, ...]:
        """Return the tested torch versions without the error.

        On these, the error's smallest program is right, is refused, or fails in another way.
        """
        return tuple(version for version, found in self.shows.items() if found not in SHOWING)

    def _is_raised(self, program: TensorProgram, failure: Failure) -> bool:
        """Whether ranks raised the error or run in it; or, if all ranks wait, whether the hang's summary mentions it."""
        active = [each for each in failure.reports if not each.pending]
        found = "\n".join("\n".join((each.error, *FRAME.findall(each.stack))) for each in active) or failure.summary
        where = "\n".join(each.error or "\n".join(OPERATION.findall(each.stack)) for each in active) or failure.summary
        is_here = bool(BACKWARD.search(where)) or self._named_in(where) or self._is_computed_from_source(program, where)
        return is_here and re.search(self.raises, found) is not None

    def _named_in(self, text: str) -> bool:
        if not self.operations:
            return not self.sources
        return not {*re.findall(r"\w+", text)}.isdisjoint(self.operations)

    def _is_computed_from_source(self, program: TensorProgram, text: str) -> bool:
        """Whether the statement named in the text is computed from a value left wrong by an operation in `sources`."""
        found = STATEMENT.search(text)
        return found is not None and not self._wrong_statements(program).isdisjoint(_ancestors(program, int(found[1])))

    def _has_gradient_from_source(self, program: TensorProgram, text: str) -> bool:
        """Whether the named value and a wrong value are combined later, because gradients flow from there to the named value."""
        if self.can_swap_gradients:
            return True
        found, wrong = STATEMENT.search(text), self._wrong_statements(program)
        if found is None or not wrong:
            return False
        first = int(found[1])
        combined = ({number, *_ancestors(program, number)} for number in range(first, len(program.statements)))
        return any(first in each and not wrong.isdisjoint(each) for each in combined)

    def _wrong_statements(self, program: TensorProgram) -> set[int]:
        """Return the numbers of the statements in `sources`, and of the arguments that these statements can change."""
        wrong = {number for number, each in enumerate(program.statements) if _name(each) in self.sources}
        if self.can_change_arguments:
            wrong |= {argument for number in wrong for argument in _arguments(program, number)}
            # A redistribution to the placements that a tensor has gives a tensor with the same spec.
            moved = [number for number in wrong if isinstance(program.statements[number], Redistribution)]
            wrong |= {argument for number in moved for argument in _ancestors(program, number)}
        return wrong


def _name(statement: Statement) -> str:
    return statement.name if isinstance(statement, Operation) else statement.tag


def _arguments(program: TensorProgram, number: int) -> set[int]:
    return {number - back for back in arguments_of(program.statements[number])}


def _ancestors(program: TensorProgram, number: int) -> set[int]:
    """Return the numbers of the statements from which a statement is computed, without its own."""
    found = _arguments(program, number)
    for each in range(number - 1, -1, -1):
        if each in found:
            found |= _arguments(program, each)
    return found
