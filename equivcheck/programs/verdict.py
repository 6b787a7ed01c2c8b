"""Verdict on a tensor program."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.programs.nouns.program import TensorProgram

BACKWARD = -1
"""Statement number for a refusal in the backward pass, after all statements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An operation that a rank refused with a clear error."""

    statement: int
    """Statement number from 0; -1 for the backward pass."""
    text: str
    """Error message in one line."""

    @property
    def kind(self) -> str:
        """Return the error type."""
        return self.text.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVerdict(CaseVerdict):
    """Result from `check` for a tensor program."""

    program: TensorProgram
    """The checked program."""
    refusals: tuple[Refusal, ...] = ()
    """Statements that every rank refused with the same clear error. The program continued with single-device values."""
    clones: tuple[int, ...] = ()
    """Statements that did not apply to their arguments. These statements cloned the first argument instead."""
    types: str = ""
    """Errors of the type checker, if the target has one. Empty if the program is accepted."""

    @property
    def case(self) -> TensorProgram:
        """Return the program."""
        return self.program

    def _evidence(self) -> list[str]:
        refused = ("backward" if each.statement == BACKWARD else f"statement {each.statement}" for each in self.refusals)
        refusals = [f"refused: {what}: {each.text}" for what, each in zip(refused, self.refusals, strict=True)]
        types = [f"types: {self.types}"] if self.types else []
        return [*super(ProgramVerdict, self)._evidence(), *refusals, *types]
