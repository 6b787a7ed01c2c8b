"""Verdict on a tensor program."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.programs.nouns.program import TensorProgram

BACKWARD = -1
"""Statement number for a refusal in the backward pass, after all statements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A statement in a tensor program, refused on a rank with a clear error."""

    statement: int
    """Statement number, from 0; -1 for the backward pass."""
    text: str
    """The error as one line: ``Type: message``."""

    @property
    def kind(self) -> str:
        """The error type's name."""
        return self.text.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVerdict(CaseVerdict):
    """Outcome and evidence from a check on a tensor program."""

    program: TensorProgram
    """The tensor program that was checked."""
    refusals: tuple[Refusal, ...] = ()
    """Statements that every rank refused with the same clear error. The program continued with the values from one device."""
    clones: tuple[int, ...] = ()
    """Statements that did not apply to their arguments, by number. They cloned the first argument instead."""
    types: str = ""
    """Error from a type checker, if the target has one. Empty if it accepts the program."""

    @property
    def case(self) -> TensorProgram:
        """The tensor program that was checked."""
        return self.program

    def _evidence(self) -> list[str]:
        refused = ("backward" if each.statement == BACKWARD else f"statement {each.statement}" for each in self.refusals)
        refusals = [f"refused: {what}: {each.text}" for what, each in zip(refused, self.refusals, strict=True)]
        types = [f"types: {self.types}"] if self.types else []
        return [*super(ProgramVerdict, self)._evidence(), *refusals, *types]
