"""Targets on which ranks can run a tensor program, by name."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.errors import UsageError
from equivcheck.programs.run.rank import DTensorTarget


def _plain() -> type[DTensorTarget]:
    from equivcheck.programs.run.plain.target import PlainTarget

    return PlainTarget


def _compiled() -> type[DTensorTarget]:
    from equivcheck.programs.run.compiled import CompiledTarget

    return CompiledTarget


def _typed() -> type[DTensorTarget]:
    try:
        from equivcheck.programs.run.plain.typed import TypedTarget
    except ModuleNotFoundError as error:
        raise UsageError(f"target 'typed' is not valid: {error.name} is missing. Expected pip install spmd_types") from error
    return TypedTarget


TARGETS: dict[str, Callable[[], type[DTensorTarget]]] = {
    "dtensor": lambda: DTensorTarget,
    "plain": _plain,
    "typed": _typed,
    "compiled": _compiled,
}
"""DTensors; plain tensors with functional collectives; plain tensors with collectives of spmd_types, whose type checker is
asked too; DTensors with each operation compiled, in processes."""


def target_of(name: str) -> type[DTensorTarget]:
    """Target with this name. Raises `UsageError`."""
    if name not in TARGETS:
        raise UsageError(f"target {name!r} is not valid: unknown name. Expected {', '.join(TARGETS)}")
    return TARGETS[name]()
