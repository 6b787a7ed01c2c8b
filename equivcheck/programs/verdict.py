"""The outcome of the check of a tensor program."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.programs.nouns.program import TensorProgram

BACKWARD = -1
"""The place of a refusal of the backward pass, after all statements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a rank refused."""

    statement: int
    """Which statement, from 0; -1 for the backward pass."""
    text: str
    """What it raised, in one line."""

    @property
    def kind(self) -> str:
        """The type of what it raised."""
        return self.text.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVerdict(CaseVerdict):
    """What `check` returns of a tensor program."""

    program: TensorProgram
    """What was checked."""
    refusals: tuple[Refusal, ...] = ()
    """What every rank refused, clearly and alike: the program went on with what one device computes."""
    clones: tuple[int, ...] = ()
    """Statements that did not apply, and cloned their first argument."""
    types: str = ""
    """What a type checker says against the program, where one was asked; empty where it accepts it."""

    @property
    def case(self) -> TensorProgram:
        """The program."""
        return self.program

    def _evidence(self) -> list[str]:
        refused = ("backward" if each.statement == BACKWARD else f"statement {each.statement}" for each in self.refusals)
        told = [f"refused: {what}: {each.text}" for what, each in zip(refused, self.refusals, strict=True)]
        types = [f"types: {self.types}"] if self.types else []
        return [*super(ProgramVerdict, self)._evidence(), *told, *types]
