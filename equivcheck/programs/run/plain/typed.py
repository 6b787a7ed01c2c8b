"""Runs tensor programs on plain tensors with the collectives of spmd_types. Its type checker judges each statement.

Its types correspond to placements along each axis: R is replicated with a partial gradient, V is sharded, P is partial. See
https://github.com/meta-pytorch/spmd_types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.checker import typecheck

from equivcheck.programs.nouns.placement import reduction_of, sharded_dim
from equivcheck.programs.nouns.program import Operation
from equivcheck.programs.run.one_device import Outputs, ProgramPlan
from equivcheck.programs.run.plain.collectives import Collectives
from equivcheck.programs.run.plain.conversion import Placements
from equivcheck.programs.run.plain.target import PlainTarget
from equivcheck.programs.run.rank import StatementFailed, run_on_rank
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.fake.ranks import FakeRanks


class TypedCollectives(Collectives):
    """Collectives from the package spmd_types along one mesh axis. They change the placement of plain tensors along this axis."""

    def __init__(self, mesh: Any, axis: int) -> None:
        super().__init__(mesh, axis)
        self.group = mesh.get_group(axis)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as inherited
        return _tensor(spmd.all_gather(rows, self.group, src=spmd.S(0), dst=spmd.R))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as inherited
        return _tensor(spmd.all_reduce(partial, self.group, src=spmd.P, dst=spmd.R))

    def sum_parts(self, partial: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as inherited
        return _tensor(spmd.reduce_scatter(partial, self.group, src=spmd.P, dst=spmd.S(0)))

    def exchange(self, sent: torch.Tensor, sizes: list[int], received: list[int], largest: int) -> torch.Tensor:
        """Exchange pieces after padding them to `largest` elements, because gloo refuses pieces of different sizes."""
        pieces = [torch.cat([piece, piece.new_zeros(largest - len(piece))]) for piece in torch.split(sent, sizes)]
        found = spmd.all_to_all(torch.stack(pieces), self.group, src=spmd.V, dst=spmd.V)
        return torch.cat([row[:length] for row, length in zip(found, received, strict=True)])

    def to_partial(self, whole: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as inherited
        return _tensor(spmd.convert(whole, self.group, src=spmd.R, dst=spmd.P))

    def as_varying(self, whole: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as inherited
        return _tensor(spmd.reinterpret(whole, self.group, src=spmd.R, dst=spmd.V, expert_mode=True))

    def as_partial(self, part: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as inherited
        return _tensor(spmd.reinterpret(part, self.group, src=spmd.V, dst=spmd.P))


class TypedTarget(PlainTarget):
    """Runs a program's statements with the collectives from spmd_types.

    The type checker of spmd_types runs separately, in `type_errors`.
    """

    collectives = TypedCollectives

    def results(self, statement: Operation, parts: list[torch.Tensor], wanted: list[Placements], left: Placements) -> Outputs:
        """Run an operation on this rank's parts. If its sharding rule makes the results partial, mark them as partial."""
        found = super().results(statement, parts, wanted, left)
        for number, axis in enumerate(self.axes):
            if reduction_of(left[number]) and not any(reduction_of(each[number]) for each in wanted):
                found = tuple(axis.as_partial(each) for each in found)
        return found

    @classmethod
    def type_errors(cls, plan: ProgramPlan) -> str:
        """Return the first statement rejected by spmd_types' type checker, with its message; empty if it accepts all."""
        return refused_by_types(plan, cls)


class TypeChecks(PlainTarget):
    """Mixin to run each statement under spmd_types' type checker.

    Each result's type must match its placements, otherwise `SpmdTypeError` is raised.
    """

    def distribute(self, full: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        """Return this rank's part from a full tensor, and check its type against its placements."""
        part = super().distribute(full, placements)
        spmd.assert_type(part, self._types(placements))
        return part

    def from_replicated(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that all ranks have, and check that the copy's type is replicated."""
        part = super().from_replicated(value)
        spmd.assert_type(part, self._types(self.replicated))
        return part

    def call(self, statement: Operation, arguments: list[Any]) -> Outputs:
        """Run an operation under the type checker, and compare its results' types with their placements."""
        return tuple(self._checked(each) for each in _under_types(lambda: super(TypeChecks, self).call(statement, arguments)))

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Change placements under the type checker, and compare the result's type with them."""
        return self._checked(_under_types(lambda: super(TypeChecks, self).redistribute(value, placements)))

    def clone(self, value: Any) -> torch.Tensor:
        """Clone a value under the type checker."""
        return _tensor(_under_types(lambda: super(TypeChecks, self).clone(value)))

    def _types(self, placements: Placements) -> dict[Any, Any]:
        return {axis.group: _type_of(each) for axis, each in zip(self.axes, placements, strict=True) if axis.size > 1}

    def _checked(self, value: Any) -> torch.Tensor:
        """Require that types and placements of a value agree. Raises `SpmdTypeError`."""
        spmd.assert_type(value, self._types(value.placements))
        return _tensor(value)


def _under_types(run: Callable[[], Any]) -> Any:
    with typecheck("permissive", local=True):
        return run()


def _type_of(placement: str) -> Any:
    if sharded_dim(placement) is not None:
        return spmd.V
    return spmd.R if reduction_of(placement) is None else spmd.P


def _tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value
    return found


def refused_by_types(plan: ProgramPlan, target: type[TypedTarget]) -> str:
    """Return the first statement rejected by the type checker, with its message; empty if it accepts all statements.

    Only one rank runs, because types do not depend on values. Its values are wrong, because it gets nothing from other ranks. If
    a wrong value makes a statement fail, later statements are not checked.
    """
    checked = type(target.__name__, (TypeChecks, target), {})
    try:
        FakeRanks(plan.program.num_ranks).run(run_on_rank, replace(plan, differentiable=False), checked)
    except RanksFailed as error:
        words = error.failure.summary.removeprefix(f"{StatementFailed.__name__}: ")
        return words if f": {spmd.SpmdTypeError.__name__}: " in words else ""
    return ""
