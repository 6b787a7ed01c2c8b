"""Programs on DTensors in which each operation is compiled separately."""

from __future__ import annotations

import torch

from equivcheck.programs.nouns.program import TensorProgram
from equivcheck.programs.nouns.statements import Operation
from equivcheck.programs.run.calls import call, function_of
from equivcheck.programs.run.one_device import Outputs
from equivcheck.programs.run.rank import DTensorTarget

BACKEND = "aot_eager"
"""Traces forward and backward, and runs the trace without generating code."""


class CompiledTarget(DTensorTarget):
    """Runs operations under `torch.compile`."""

    needs_processes = True

    def __init__(self, program: TensorProgram) -> None:
        super().__init__(program)
        torch._dynamo.reset()

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Compile the operation for these arguments, and run it."""
        compiled = torch.compile(function_of(statement.name), backend=BACKEND, dynamic=False)
        return call(compiled, statement.name, arguments, statement.dim)
