"""Runs a tensor program on every rank with DTensors, and reads all values and gradients as full tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from equivcheck.errors import EquivCheckError
from equivcheck.programs.nouns.placement import partial, reduction_of, sharded_dim
from equivcheck.programs.nouns.program import (
    Constant,
    Leaf,
    Operation,
    Redistribution,
    RoundTrip,
    Statement,
    TensorProgram,
    arguments_of,
)
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.one_device import Outputs, ProgramPlan, differentiate, gradient_of, value_of
from equivcheck.programs.run.reading import full_of, require_parts
from equivcheck.programs.run.refusals import refusal
from equivcheck.programs.run.values import full_tensor, local_part
from equivcheck.programs.verdict import BACKWARD, Refusal
from equivcheck.worlds.dtensor_caches import forget_shardings
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import Moment, ValueTrace
from equivcheck.worlds.trace.trace import Piece, Snapshot

REFUSED = "refused by some ranks only, statement "
"""Start of the error text if a refusal ends a rank."""


KEPT_FOR_ALL = frozenset({"init_eye"})
"""Operations whose sharding DTensor caches regardless of their arguments. The cache is cleared before they run."""


class StatementFailed(EquivCheckError):
    """A statement of a tensor program raised on a rank, and the error is not a clear refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Values and refusals recorded on one rank from a tensor program."""

    trace: ValueTrace
    """All values, then all gradients, as full tensors."""
    refusals: tuple[Refusal, ...]
    """Statements refused on this rank, in order."""


def torch_placements(placements: tuple[str, ...]) -> tuple[Placement, ...]:
    """Convert placement texts, such as ``S(0)``, to torch's placement objects."""
    return tuple(_torch_placement(each) for each in placements)


def _torch_placement(placement: str) -> Placement:
    dim, reduction = sharded_dim(placement), reduction_of(placement)
    if dim is not None:
        return Shard(dim)
    return Replicate() if reduction is None else Partial(reduction)


def placement_text(placement: Placement) -> str:
    """Return a placement as text, in the form printed by torch 2.10 and later.

    Earlier versions print a Partial without its reduction.
    """
    return partial(placement.reduce_op) if type(placement) is Partial else str(placement)


class DTensorTarget:
    """Runs a program's statements on DTensors.

    Other targets are subclasses: on plain tensors, compiled, or with a planted bug.
    """

    needs_processes: ClassVar[bool] = False
    """Whether ranks must be processes, because the target does not work on threads."""
    fills_gradients: ClassVar[bool] = False
    """Whether a missing gradient on one device counts as zeros, because backward through a collective turns it into zeros."""
    runs_on_dtensors: ClassVar[bool] = True
    """Whether statements run on DTensors, so that known DTensor errors can explain a finding."""
    planted_in: ClassVar[frozenset[str]] = frozenset()
    """Operations in which a target's planted bug can show; empty if it can show in any."""

    @classmethod
    def type_errors(cls, plan: ProgramPlan) -> str:  # noqa: ARG003 - used by targets with a type checker
        """Return an error from the target's type checker; empty if it accepts the program or there is no type checker."""
        return ""

    def __init__(self, program: TensorProgram) -> None:
        self.program = program
        self.mesh: DeviceMesh = device_mesh(program.mesh, program.axis_names)
        if not KEPT_FOR_ALL.isdisjoint(program.operations):
            forget_shardings()

    def distribute(self, full: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        """Return the DTensor with these placements for a full tensor, without communication."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        local = local_part(full, self.program.mesh, coordinate, placements)
        return self.from_local(local, torch_placements(placements), full.shape, full.stride())

    def from_local(self, local: torch.Tensor, placements: Any, shape: Any, stride: Any) -> torch.Tensor:
        """Build a DTensor from this rank's local tensor, without communication, because shape and strides are known."""
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Run a statement's operation on DTensors, and return all its results."""
        return results_of(statement.name, arguments, statement.dim)

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Return a value redistributed to other placements."""
        moved: torch.Tensor = value.redistribute(self.mesh, torch_placements(placements))
        return moved

    def round_trip(self, value: Any) -> torch.Tensor:
        """Convert a value to its local tensor, and back to a DTensor."""
        return self.from_local(value.to_local(), value.placements, value.shape, value.stride())

    def full_tensor(self, value: Any) -> torch.Tensor:
        """Return a value's full tensor. A plain tensor is returned as it is."""
        return full_of(value)

    def require_parts(self, value: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise `PartsDisagree` if a value's local shape contradicts its placements.

        The same error is raised if the value's shape or dtype differs from `expected`.
        """
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        require_parts(value, expected, coordinate)

    def gradient(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return a value's gradient as a full tensor; None if it has no gradient."""
        gradient = gradient_of(value)
        return None if gradient is None else self.full_tensor(gradient.detach())

    def clone(self, value: torch.Tensor) -> torch.Tensor:
        """Clone a value. This replaces a statement that torch cannot run on the value."""
        return value.clone()

    def as_value(self, value: torch.Tensor) -> torch.Tensor:
        """Return an operation's result as a DTensor. A plain tensor counts as replicated."""
        if isinstance(value, DTensor):
            return value
        return self.from_replicated(value)

    def from_replicated(self, value: torch.Tensor) -> torch.Tensor:
        """Return a replicated DTensor for a tensor that all ranks have."""
        return DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)


def run_on_rank(plan: ProgramPlan, target_class: type[DTensorTarget], raising: frozenset[str] | None = None) -> RankResult:
    """Run a program's statements and its backward pass on this rank.

    `raising` contains the statements that ranks may refuse; None allows all. A refusal of any other statement raises
    `StatementFailed`.
    """
    return _RankRun(plan, target_class(plan.program), raising).result()


class _RankRun:
    def __init__(self, plan: ProgramPlan, target: DTensorTarget, raising: frozenset[str] | None) -> None:
        self.plan, self.target, self.raising = plan, target, raising
        self.sinks = frozenset(plan.program.sinks())
        self.values: list[torch.Tensor] = []
        self.full_values: list[torch.Tensor] = []
        self.read: dict[str, torch.Tensor | None] = {}
        self.refusals: list[Refusal] = []

    def result(self) -> RankResult:
        for number, statement in enumerate(self.plan.program.statements):
            self._run(number, statement)
        gradients = self._gradients()
        trace = ValueTrace(moments=(moment(Phase.VALUE, self.read), moment(Phase.GRADIENT, gradients)))
        return RankResult(trace=trace, refusals=tuple(self.refusals))

    def _run(self, number: int, statement: Statement) -> None:
        try:
            outputs = self._outputs(number, statement)
            full_values = self._full_values(number, statement, outputs)
        except Exception as error:
            outputs, full_values = self._refused(number, error)
        chosen = value_of(statement, outputs, self.plan.applies[number])
        self.values.append(self.target.as_value(chosen))
        self.full_values.append(value_of(statement, full_values, self.plan.applies[number]))
        if self.plan.is_read(number):
            for name, each in zip(value_names(self.plan, number, len(full_values)), full_values, strict=True):
                self.read[name] = each.detach()
        if self.plan.every_gradient and self.values[-1].requires_grad:
            self.values[-1].retain_grad()

    def _outputs(self, number: int, statement: Statement) -> Outputs:
        arguments = [self.values[number - back] for back in arguments_of(statement)]
        if isinstance(statement, (Leaf, Constant)):
            part = self.target.distribute(full_tensor(statement), statement.placements)
            return (part.requires_grad_() if isinstance(statement, Leaf) else part,)
        if not self.plan.applies[number]:
            return (self.target.clone(arguments[0]),)
        if isinstance(statement, Redistribution):
            return (self.target.redistribute(arguments[0], statement.placements),)
        if isinstance(statement, RoundTrip):
            return (self.target.round_trip(arguments[0]),)
        return self.target.call(statement, arguments)

    def _full_values(self, number: int, statement: Statement, outputs: Outputs) -> Outputs:
        """Return full values. Only a sink keeps its gradient; unread values stay unchanged."""
        chosen = value_of(statement, outputs, self.plan.applies[number])
        with_gradient = number in self.sinks
        if self.plan.checks_parts:
            for each, expected in zip(outputs, self.plan.outputs[number], strict=False):
                self.target.require_parts(each, expected)
        if not self.plan.is_read(number):
            return outputs
        return tuple(self._full_value(each, with_gradient=with_gradient and each is chosen) for each in outputs)

    def _full_value(self, value: torch.Tensor, *, with_gradient: bool) -> torch.Tensor:
        with torch.set_grad_enabled(with_gradient):
            return self.target.full_tensor(value)

    def _refused(self, number: int, error: Exception) -> tuple[Outputs, Outputs]:
        text = refusal(error)
        if text is None:
            name = value_names(self.plan, number, 1)[0]
            raise StatementFailed(f"{name}: {type(error).__name__}: {error}") from error
        self._note(number, text)
        plain = tuple(each.clone() for each in self.plan.outputs[number])
        return tuple(self.target.from_replicated(each) for each in plain), plain

    def _note(self, number: int, text: str) -> None:
        place = str(number)
        if self.raising is not None and place not in self.raising:
            # The operation's name lets known issues recognize the refusal.
            name = "" if number == BACKWARD else f"{self.plan.display_name(number)}: "
            raise StatementFailed(f"{REFUSED}{place}: {name}{text}")
        self.refusals.append(Refusal(statement=number, text=text))

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        try:
            if self.plan.differentiable:
                differentiate(self.plan.program, self.full_values)
            return {name: self.target.gradient(self.values[number]) for name, number in self.plan.compared_gradients.items()}
        except Exception as error:
            text = refusal(error)
            if text is None:
                raise StatementFailed(f"backward: {type(error).__name__}: {error}") from error
            self._note(BACKWARD, text)
            return dict.fromkeys(self.plan.compared_gradients)


def value_names(plan: ProgramPlan, number: int, count: int) -> tuple[str, ...]:
    """Return a name for each output from statement `number`, such as ``v2 softmax``."""
    what = plan.display_name(number)
    return (f"v{number} {what}", *(f"v{number} {what}, output {output}" for output in range(1, count)))


def moment(phase: Phase, tensors: dict[str, torch.Tensor | None]) -> Moment:
    """Put full tensors into a `Moment`, so that a trace with them can be compared. -0.0 becomes 0.0."""
    found = list(tensors.items())
    flat = [each.detach().double().reshape(-1).numpy(force=True) + 0.0 for _, each in found if each is not None]
    snapshot = Snapshot(
        pieces=tuple(Piece(name=name, shape=() if each is None else tuple(each.shape)) for name, each in found),
        present=tuple(each is not None for _, each in found),
        fits=(True,) * len(found),
        dtypes=tuple("" if each is None else str(each.dtype).removeprefix("torch.") for _, each in found),
        values=np.concatenate(flat) if flat else np.empty(0),
    )
    return Moment(step=0, phase=phase, snapshot=snapshot)
