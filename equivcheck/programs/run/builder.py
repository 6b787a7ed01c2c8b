"""Builds a tensor program statement by statement. One device computes each value at once, so that the next statement can fit."""

from __future__ import annotations

import warnings

import torch

from equivcheck.programs.nouns.program import Statement, arguments_of
from equivcheck.programs.run.one_device import apply_statement, value_of


class ProgramBuilder:
    """Builds a program statement by statement, and computes the statements' values on one device."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self._values: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.statements)

    def add(self, statement: Statement) -> None:
        """Append a statement, and compute its value on one device."""
        arguments = [self._values[len(self) - back] for back in arguments_of(statement)]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = apply_statement(statement, arguments)
        self._values.append(arguments[0] if found is None else value_of(statement, found, applies=True))
        self.statements.append(statement)

    def shape(self, back: int) -> tuple[int, ...]:
        """Return the shape of an earlier value. `back` is 1 for the last value, 2 for the value before it."""
        return tuple(self._values[-back].shape)
