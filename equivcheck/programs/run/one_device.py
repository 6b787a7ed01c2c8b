"""Runs a tensor program on one device with plain tensors.

It finds out which statements apply, and computes values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import sharded_dim
from equivcheck.programs.nouns.program import (
    MAX_ELEMENTS,
    Constant,
    Leaf,
    Operation,
    Redistribution,
    Statement,
    TensorProgram,
    arguments_of,
)
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.rounding_unit import RoundingUnit
from equivcheck.programs.run.values import full_tensor, weights_of

Outputs = tuple[torch.Tensor, ...]
Disturb = Callable[[torch.Tensor, list[torch.Tensor], float], torch.Tensor]
"""Function that perturbs a value as rounding might, given the value, its arguments, and the operation's coarsest `RoundingUnit`.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramPlan:
    """A tensor program with its results on one device, and settings for ranks to run the program."""

    program: TensorProgram
    """The tensor program to run."""
    applies: tuple[bool, ...]
    """For each statement, whether torch can run it as written; otherwise it clones its first argument."""
    outputs: tuple[Outputs, ...]
    """For each statement, its outputs on one device. If all ranks refuse the statement, the program continues with these outputs.
    """
    first: tuple[int, ...]
    """For each statement, the first statement that has the same tensor object as its value. It is an earlier statement if the
    operation returns its argument, such as `a.flatten()` for a vector.
    """
    differentiable: bool = True
    """Whether one device can run the backward pass. Some torch operations have no derivative."""
    checks_parts: bool = False
    """Whether ranks compare shape, dtype and local shape of each value with one device before they read it."""
    every_gradient: bool = False
    """True if the gradients of all values are compared, in backward order; False if only those of leaves are."""
    only_sinks: bool = False
    """True if ranks read only values that no statement takes. Reading a value redistributes it, which can change later results.
    """

    fills_gradients: bool = False
    """Whether a missing gradient counts as zeros, on one device and on ranks."""

    def is_read(self, number: int) -> bool:
        """Whether ranks read the value of statement `number`. Only such values are compared with one device."""
        return not self.only_sinks or number in self.program.sinks()

    @property
    def compared_gradients(self) -> dict[str, int]:
        """Return the gradients to compare: each gradient's name, with the number of its statement.

        The name says which value has this gradient and which statements take the value, such as ``v0 into softmax``.
        """
        statements = self.program.statements
        takers: dict[int, list[str]] = {number: [] for number in range(len(statements))}
        for number, each in enumerate(statements):
            for back in arguments_of(each):
                takers[self.first[number - back]].append(self.display_name(number))
        numbers = [number for number, each in enumerate(statements) if isinstance(each, Leaf)]
        if self.every_gradient:
            numbers = [number for number in reversed(range(len(statements))) if self.first[number] == number]
        return {f"v{number} into {', '.join(takers[number]) or 'nothing'}": number for number in numbers}

    def display_name(self, number: int) -> str:
        """Return the name of statement `number` in verdicts: its operation, or its kind such as ``leaf``."""
        statement = self.program.statements[number]
        if not self.applies[number]:
            return "clone"
        return statement.name if isinstance(statement, Operation) else statement.tag


@dataclass(frozen=True, slots=True, eq=False)
class PlainRun:
    """Values and gradients that one device computed for a tensor program."""

    outputs: tuple[Outputs, ...]
    """For each statement, all its outputs."""
    gradients: tuple[torch.Tensor | None, ...]
    """Gradients in the order of `ProgramPlan.compared_gradients`."""


def plan_of(program: TensorProgram) -> ProgramPlan:
    """Run a program on one device, and return its plan.

    The plan says which statements torch can run as written.
    """
    applies: list[bool] = []
    outputs: list[Outputs] = []
    values: list[torch.Tensor] = []
    for number, statement in enumerate(program.statements):
        arguments = [values[number - back] for back in arguments_of(statement)]
        found = apply_statement(statement, arguments)
        applies.append(found is not None)
        outputs.append((arguments[0].clone(),) if found is None else found)
        if isinstance(statement, Leaf):
            outputs[-1][0].requires_grad_()
        values.append(value_of(statement, outputs[-1], applies[-1]))
    plain = tuple(tuple(each.detach() for each in found) for found in outputs)
    first = tuple(next(place for place, other in enumerate(values) if other is value) for value in values)
    return ProgramPlan(program, tuple(applies), plain, first, differentiable=_is_differentiable(program, values))


def _is_differentiable(program: TensorProgram, values: list[torch.Tensor]) -> bool:
    try:
        differentiate(program, values)
    except (RuntimeError, IndexError):  # backwards in torch raise either
        return False
    return True


def apply_statement(statement: Statement, arguments: list[torch.Tensor]) -> Outputs | None:
    """Run a statement on plain tensors. Return its outputs, or None if torch raises or the outputs cannot be compared."""
    if isinstance(statement, (Leaf, Constant)):
        return (full_tensor(statement),)
    if isinstance(statement, Redistribution):
        fits = all((sharded_dim(each) or 0) < arguments[0].ndim for each in statement.placements if sharded_dim(each) is not None)
        return (arguments[0].clone(),) if fits else None
    if not isinstance(statement, Operation):
        return (arguments[0].clone(),)
    if OPERATIONS[statement.name].distinct and len(set(arguments[0].flatten().tolist())) < arguments[0].numel():
        return None
    try:
        found = results_of(statement.name, arguments, statement.dim)
    except Exception:
        return None
    return found if statement.output < len(found) and all(map(_says_something, found)) else None


def _says_something(found: torch.Tensor) -> bool:
    if found.requires_grad and not found.is_floating_point():  # such as `integers.le_(leaf)`, whose backward is an internal error
        return False
    return found.numel() <= MAX_ELEMENTS and not found.is_complex() and bool(found.isfinite().all())


def value_of(statement: Statement, outputs: Outputs, applies: bool) -> torch.Tensor:
    """Return a statement's value: the output taken by later statements.

    If torch cannot run the statement (`applies` is false), the value is a copy of its first argument.
    """
    return outputs[statement.output] if applies and isinstance(statement, Operation) else outputs[0]


def run_on_one_device(plan: ProgramPlan, refused: frozenset[int] = frozenset(), disturb: Disturb | None = None) -> PlainRun:
    """Compute all values and gradients of a program on one device.

    Statements in `refused` get no gradient, because ranks do not differentiate them either. `disturb` changes each value by a
    rounding error.
    """
    outputs: list[Outputs] = []
    values: list[torch.Tensor] = []
    for number, statement in enumerate(plan.program.statements):
        arguments = [values[number - back] for back in arguments_of(statement)]
        found = _outputs(statement, arguments, plan.applies[number], disturb)
        if isinstance(statement, Leaf):
            found = (found[0].detach().requires_grad_(),)
        if number in refused:
            found = tuple(each.detach() for each in found)
        outputs.append(found)
        values.append(value_of(statement, found, plan.applies[number]))
        if plan.every_gradient and values[-1].requires_grad:
            values[-1].retain_grad()
    if plan.differentiable:
        differentiate(plan.program, values)
    detached = tuple(tuple(each.detach() for each in found) for found in outputs)
    return PlainRun(
        detached, tuple(gradient_of(values[number], fills=plan.fills_gradients) for number in plan.compared_gradients.values())
    )


def gradient_of(value: torch.Tensor, *, fills: bool = False) -> torch.Tensor | None:
    """Return the gradient of a value after the backward pass; None if there is none.

    If `fills` is true, the result is zeros instead of None for each value that requires a gradient.
    """
    gradient = value.grad if value.requires_grad else None
    return torch.zeros_like(value) if gradient is None and fills and value.requires_grad else gradient


def _outputs(statement: Statement, arguments: list[torch.Tensor], applies: bool, disturb: Disturb | None) -> Outputs:
    if disturb is None:
        return _exact(statement, arguments, applies)
    taken = [each.clone() if each.requires_grad else each for each in arguments]
    with RoundingUnit() as rounding:
        found = _exact(statement, taken, applies)
    if rounding.unit > torch.finfo(torch.float64).eps:
        _disturb_backward(taken, found, disturb, rounding.unit)
    return tuple(disturb(each, taken, rounding.unit) for each in found)


def _disturb_backward(arguments: list[torch.Tensor], found: Outputs, disturb: Disturb, unit: float) -> None:
    """Disturb the gradients of the arguments too, relative to those of the results.

    If an operation computes in float32, its backward rounds to float32 too. Disturbed float64 values alone do not show this.
    """
    incoming: list[torch.Tensor] = []

    # Autograd calls hooks with None if an operation gives an undefined gradient.
    def collect(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            incoming.append(gradient)

    def disturb_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else disturb(gradient, incoming, unit)

    for tensors, hook in ((found, collect), (arguments, disturb_gradient)):
        for each in tensors:
            if each.requires_grad:
                each.register_hook(hook)  # type: ignore[no-untyped-call]


def _exact(statement: Statement, arguments: list[torch.Tensor], applies: bool) -> Outputs:
    if isinstance(statement, (Leaf, Constant)):
        return (full_tensor(statement),)
    if not applies or not isinstance(statement, Operation):
        return (arguments[0].clone(),)
    return results_of(statement.name, arguments, statement.dim)


def differentiate(program: TensorProgram, full_values: list[torch.Tensor]) -> None:
    """Run the backward pass. It starts from a weighted sum over the elements of all values that no statement takes."""
    sinks = {number: full_values[number] for number in program.sinks()}
    summed = [(value.double() * weights_of(value.shape, number)).sum() for number, value in sinks.items() if value.requires_grad]
    if summed:
        sum(summed[1:], summed[0]).backward()  # type: ignore[no-untyped-call]
