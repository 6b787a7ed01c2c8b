"""Ways in which ranks can run a tensor program, by name: the targets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from equivcheck.errors import UsageError
from equivcheck.programs.nouns.program import Operation, TensorProgram
from equivcheck.programs.run.calls import call, function_of
from equivcheck.programs.run.one_device import Outputs
from equivcheck.programs.run.rank import DTensorTarget

BACKEND = "aot_eager"
"""Backend that traces forward and backward, and runs the trace without generating code."""


class CompiledTarget(DTensorTarget):
    """Runs each operation in a program on DTensors, compiled by `torch.compile`."""

    needs_processes = True

    def __init__(self, program: TensorProgram) -> None:
        super().__init__(program)
        # Private module. Without the reset, compiled operations of earlier programs count towards dynamo's recompile limit.
        torch._dynamo.reset()

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Compile a statement's operation for these arguments, and run it."""
        compiled = torch.compile(function_of(statement.name), backend=BACKEND, dynamic=False)
        return call(compiled, statement.name, arguments, statement.dim)


def _plain() -> type[DTensorTarget]:
    from equivcheck.programs.run.plain.target import PlainTarget

    return PlainTarget


def _typed() -> type[DTensorTarget]:
    try:
        from equivcheck.programs.run.plain.typed import TypedTarget
    except ModuleNotFoundError as error:
        raise UsageError(
            f"target 'typed' is not valid: {error.name} is not installed. Expected: pip install spmd_types"
        ) from error
    return TypedTarget


TARGETS: dict[str, Callable[[], type[DTensorTarget]]] = {
    "dtensor": lambda: DTensorTarget,
    "plain": _plain,
    "typed": _typed,
    "compiled": lambda: CompiledTarget,
}
"""Targets by name:
DTensors; plain tensors with functional collectives; plain tensors with collectives of spmd_types, also judged by its type
checker; DTensors with each operation compiled, in processes."""


def target_of(name: str) -> type[DTensorTarget]:
    """Return the target class with this name. Raises `UsageError` if there is none."""
    if name not in TARGETS:
        raise UsageError(f"target {name!r} is not valid: unknown name. Expected {', '.join(TARGETS)}")
    return TARGETS[name]()
