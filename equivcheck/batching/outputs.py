"""Records a model's outputs and their gradients, at each example's positions.

If outputs agree in two arrangements, their gradients show how the loss weighs each example and each output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from equivcheck.arrangements.arrangement import Arrangement
from equivcheck.arrangements.fields import tensors_in
from equivcheck.arrangements.rows import Rows


@dataclass(slots=True, eq=False)
class Output:
    """One tensor in the result of a model call."""

    name: str
    """Keys and indices that lead to the tensor in the model's result. Empty if the result is this tensor."""
    value: torch.Tensor
    """Copy of the tensor, without its autograd graph."""
    node: Any
    """The tensor's `grad_fn`; None if it has no graph."""
    is_final: bool = False
    """Whether the tensor has positions or rows, and no other such output is computed from it."""
    gradient: torch.Tensor | None = None
    """Gradient of the loss with respect to this output; None if backward computed none."""

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient that backward computed for this output."""
        self.gradient = gradient.detach().clone() if self.gradient is None else self.gradient + gradient.detach()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """Each example's model outputs and output gradients, recorded in one arrangement."""

    values: Mapping[int, tuple[torch.Tensor, ...]]
    """Each example's outputs at its own positions or row, by the example's id. Empty if the outputs' shapes do not fit."""
    names: tuple[str, ...] = ()
    """Phrases for the final outputs that have gradients, such as ``'logits'``."""
    gradients: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Each example's gradients with respect to these outputs, by the example's id. They are added up if the example occurs twice.
    """
    finals: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Each example's values in these outputs, by the example's id."""
    padding: tuple[tuple[int, ...], ...] = ()
    """For each of these outputs: the padding positions with a gradient, as distances to the row's next example.

    Padding behind an example has distance 0.
    """


class Watch:
    """Records a model's outputs in each call, and their gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[list[Output]] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Each call's arguments."""
        model.register_forward_hook(self._add, with_kwargs=True)

    def _add(self, _module: nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
        self.inputs.append((arguments, keywords))
        outputs = []
        for name, tensor in named_outputs(result).items():
            output = Output(name=name, value=tensor.detach().clone(), node=tensor.grad_fn)
            outputs.append(output)
            if tensor.requires_grad:
                tensor.register_hook(output.add)  # type: ignore[no-untyped-call]
        self._calls.append(outputs)

    @property
    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """Gradients at the model's final outputs: a dict for each call, from output name to gradient.

        An output is final if no other recorded output is computed from it.
        """
        return [
            {each.name: each.gradient for each in call if each.is_final and each.gradient is not None} for call in self._calls
        ]

    def observation(self, arrangement: Arrangement, is_by_row: Callable[[torch.Tensor, Rows], bool]) -> Observed:
        """Split the recorded outputs and gradients by example. `arrangement` is the one on which the model trained.

        ``is_by_row(tensor, rows)`` returns whether a tensor has one row for each row in a microbatch.
        """
        values: dict[int, tuple[torch.Tensor, ...]] = {}
        gradients: dict[int, tuple[torch.Tensor, ...]] = {}
        finals: dict[int, tuple[torch.Tensor, ...]] = {}
        names: tuple[str, ...] = ()
        padding: list[set[int]] = []
        num_calls, rest = divmod(len(self._calls), len(arrangement.microbatches))
        if rest or not num_calls:
            return Observed(values={})
        for number, rows in enumerate(arrangement.microbatches):
            calls = self._calls[number * num_calls : (number + 1) * num_calls]
            outputs, is_positional = _chosen(calls, rows, is_by_row)
            final = _with_gradients(outputs)
            names = tuple(_name(each, calls) for each in final)
            padding = padding or [set() for _ in final]
            for row, start, example in rows.positions:
                part = (row, slice(start, start + example.length)) if is_positional else (row,)
                values[id(example)] = tuple(each.value[part] for each in outputs)
                own = tuple(each.gradient[part] for each in final if each.gradient is not None)
                before = gradients.get(id(example), tuple(map(torch.zeros_like, own)))  # the batch twice has examples twice
                gradients[id(example)] = tuple(map(torch.add, before, own))
                finals[id(example)] = tuple(each.value[part] for each in final)
            for distances, each in zip(padding, final, strict=False):
                if is_positional and each.gradient is not None:
                    distances.update(_distances(each.gradient, rows))
        if not all(values.values()):
            return Observed(values={})
        return Observed(
            values=values,
            names=names,
            gradients=gradients,
            finals=finals,
            padding=tuple(tuple(sorted(each)) for each in padding),
        )


def _chosen(
    calls: Sequence[Sequence[Output]], rows: Rows, is_by_row: Callable[[torch.Tensor, Rows], bool]
) -> tuple[list[Output], bool]:
    """Return the outputs with positions, or else the outputs with a row for each example.

    Also return whether they have positions.
    """
    outputs = [each for call in calls for each in call if each.value.dim()]
    by_position = [each for each in outputs if each.value.shape[:2] == (len(rows.rows), rows.length)]
    by_row = [] if by_position or rows.is_packed else [each for each in outputs if is_by_row(each.value, rows)]
    found = by_position or by_row
    _mark_final(found)
    return found, bool(by_position)


def _with_gradients(outputs: Sequence[Output]) -> list[Output]:
    return [each for each in outputs if each.is_final and each.gradient is not None]


def _name(output: Output, calls: Sequence[Sequence[Output]]) -> str:
    """Return words such as ``'logits'``, or ``'logits' of call 2`` if the model is called more than once for a microbatch."""
    number = next(number for number, call in enumerate(calls, 1) if output in call)
    name = repr(output.name) if output.name else ""
    return name if len(calls) == 1 else f"{name} of call {number}".strip()


def _mark_final(outputs: Sequence[Output]) -> None:
    """Mark final outputs.

    An output from which another is computed, such as hidden states, is not final: its gradients mix positions.
    """
    for output in outputs:
        others = [each.node for each in outputs if each.node is not None and each.node is not output.node]
        output.is_final = output.node is None or output.node not in _nodes_before(others)


def _nodes_before(nodes: Sequence[Any]) -> set[Any]:
    """Return the autograd nodes that can be reached from these nodes."""
    found: set[Any] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [each for each, _ in node.next_functions]
    return found


def _distances(gradient: torch.Tensor, rows: Rows) -> set[int]:
    """Return the distances from padding that has a gradient to the next example in its row; 0 if no example follows."""
    inside = torch.zeros(gradient.shape[:2], dtype=torch.bool)
    starts: dict[int, int] = {}
    for row, start, example in rows.positions:
        inside[row, start : start + example.length] = True
        starts[row] = min(start, starts.get(row, start))
    there = gradient.flatten(2).abs().sum(2) if gradient.dim() > 2 else gradient.abs()
    places = torch.nonzero((there != 0).cpu() & ~inside).tolist()
    return {max(starts[row] - position, 0) for row, position in places}


def _plain(output: Any) -> Any:
    """Return a model's output as nested containers.

    In transformers, an output is a dict; elsewhere it is often a dataclass.
    """
    if isinstance(output, Mapping):
        return dict(output)
    is_instance = dataclasses.is_dataclass(output) and not isinstance(output, type)
    return vars(output) if is_instance else output


def named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a model's result. Names are the keys and indices that lead to them."""
    return {".".join(map(str, path)): tensor for path, tensor in tensors_in(_plain(result))}
