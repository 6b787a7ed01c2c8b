"""A training step as one graph: `make_fx` traces forward, backward, clipping and update, and each rank runs the graph.

DTensors are converted to local tensors outside the graph and back inside it, so the graph has only local operations and
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from equivcheck.layouts.base.distribute import redistribute_gradients
from equivcheck.scenario import AuxiliaryLinear, ClipNorm, ClipValue
from equivcheck.training.accumulate import full_value, microbatch_loss
from equivcheck.training.material import Batch
from equivcheck.training.read import canonical_name
from equivcheck.training.setup import Setup

Nest = Any
"""Tensors (or their stand-ins), or nested lists and dicts of tensors. None stays None."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A local tensor's position in the flat list, and the function that rebuilds the original tensor."""

    index: int
    rebuilt: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Graph:
    run: GraphModule
    results: Nest


def trace_steps(setup: Setup) -> None:
    """Change a setup so that each step runs as one traced graph.

    A step needs a new graph if shapes or learning rates change, or if other parameters than before have gradients at its start.
    """
    steps = _WholeSteps(setup)
    setup.before_step.append(steps.prepare)
    setup.compute, setup.clip_norm, setup.update = steps.compute, steps.clip_norm, steps.update


def traced_graphs(setup: Setup) -> tuple[GraphModule, ...]:
    """Return the graphs traced so far for a setup that `trace_steps` changed."""
    steps = setup.update.__self__  # type: ignore[attr-defined]
    assert isinstance(steps, _WholeSteps), "trace_steps() has changed the setup"
    return tuple(graph.run for graph in steps.graphs.values())


@dataclass(slots=True, eq=False)
class _WholeSteps:
    setup: Setup
    """Copy of the original setup, for computing a step without a graph. The original's fields point to this object."""
    optimizer: torch.optim.Optimizer = field(init=False)
    graphs: dict[object, _Graph] = field(default_factory=dict)
    results: dict[str, Nest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.setup = replace(self.setup, before_step=[], before_update=[])

    def prepare(self, optimizer: torch.optim.Optimizer, _index: int) -> None:
        self.optimizer = optimizer

    def compute(self, setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        """Run the graph of the whole step, set the gradients, and return the loss.

        The graph's other outputs are kept for `clip_norm` and `update`.
        """
        given = self._given([setup.take(batch) for batch in microbatches])
        plan, tensors = _taken_apart(given)
        key = self._key(given, index), len(microbatches), microbatches[0].divisor
        if key not in self.graphs:
            self.graphs[key] = _traced(partial(self._step, index, microbatches), plan, tensors)
        graph = self.graphs[key]
        self.results = _each(graph.results, partial(_rebuilt, graph.run(*tensors)))
        self._leave(self.results["gradients"])
        return float(self.results["loss"])

    def clip_norm(self, _module: nn.Module, _parameters: list[torch.Tensor], _clipping: ClipNorm) -> torch.Tensor:
        """Set the gradients to the graph's clipped gradients, and return the norm before clipping."""
        self._leave(self.results["clipped"])
        norm: torch.Tensor = self.results["norm"]
        return norm

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the graph's new parameters and optimizer state into the training."""
        results = zip(self._parameters().values(), self.results["parameters"], self.results["state"], strict=True)
        for parameter, updated, state in results:
            _local(parameter).copy_(_local(updated))
            if state:
                optimizer.state[parameter] = state
        # A schedule warns unless the optimizer has stepped; without gradients the step does nothing.
        gradients = [parameter.grad for parameter in self._parameters().values()]
        optimizer.zero_grad()
        optimizer.step()
        self._leave(gradients)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.setup.model.named_parameters())

    def _leave(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters().values(), gradients, strict=True):
            parameter.grad = gradient

    def _given(self, batches: list[Batch]) -> dict[str, Nest]:
        parameters, state = self._parameters().values(), self.optimizer.state
        changed = {
            "parameters": [parameter.detach() for parameter in parameters],
            "gradients": [parameter.grad for parameter in parameters],
            "state": [dict(state.get(parameter, {})) for parameter in parameters],
        }
        # The graph changes its inputs in place, but the loop still reads their old values. Buffers are not read later.
        copied: dict[str, Nest] = _each(changed, torch.clone)
        return copied | {
            "buffers": dict(self.setup.model.named_buffers()),
            "batches": [[batch.inputs, batch.targets, *batch.masks] for batch in batches],
        }

    def _key(self, given: dict[str, Nest], index: int) -> object:
        """Return a key for a graph: even or odd step, learning rates, and which gradients and state exist."""
        changing = any(layer.auxiliary is AuxiliaryLinear.EVEN_STEPS for layer in self.setup.training.model.layers)
        rates = tuple(group["lr"] for group in self.optimizer.param_groups)
        there = tuple(gradient is not None for gradient in given["gradients"])
        return changing and index % 2, rates, there, tuple(tuple(state) for state in given["state"])

    def _step(self, index: int, whole_batches: Sequence[Batch], given: dict[str, Nest]) -> dict[str, Nest]:
        """Compute a step from the given tensors only."""
        parameters = self._leaves(given)
        optimizer = self._optimizer(parameters, given["state"])
        named = parameters | given["buffers"]

        def call_model(*inputs: Any) -> torch.Tensor:
            outputs: torch.Tensor = functional_call(self.setup.model, named, inputs)
            return outputs

        setup = replace(self.setup, parts=[call_model])  # type: ignore[list-item]
        loss = torch.zeros((), dtype=torch.float64)
        for (inputs, targets, *masks), each in zip(given["batches"], whole_batches, strict=True):
            part = microbatch_loss(setup, replace(each, inputs=inputs, targets=targets, masks=tuple(masks)), index, each.rows)
            part.backward()  # type: ignore[no-untyped-call]
            loss = loss + full_value(part)
        results = {"loss": loss, "gradients": _gradients(parameters)}
        results |= self._clip(parameters)
        optimizer.step()
        return results | {
            "parameters": [parameter.detach() for parameter in parameters.values()],
            "state": [dict(optimizer.state.get(parameter, {})) for parameter in parameters.values()],
        }

    def _leaves(self, given: dict[str, Nest]) -> dict[str, torch.Tensor]:
        leaves = {}
        rows = zip(self._parameters().items(), given["parameters"], given["gradients"], strict=True)
        for (name, parameter), tensor, gradient in rows:
            leaves[name] = tensor.detach().requires_grad_(parameter.requires_grad)
            leaves[name].grad = gradient
        # The graph's leaves lack the parameters' hooks.
        if self.setup.layout is not None and self.setup.layout.redistributes_gradients:
            redistribute_gradients(leaves.values())
        return leaves

    def _optimizer(self, parameters: dict[str, torch.Tensor], states: list[dict[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """Return an optimizer like the train loop's, for other tensors."""
        pairs = [(canonical_name(name), parameter) for name, parameter in parameters.items()]
        optimizer = self.setup.build_optimizer(self.setup.training, pairs)
        for group, original in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
            group["lr"] = original["lr"]
        for parameter, state in zip(parameters.values(), states, strict=True):
            if state:
                optimizer.state[parameter] = state
        return optimizer

    def _clip(self, parameters: dict[str, torch.Tensor]) -> dict[str, Nest]:
        clipping, tensors = self.setup.training.clipping, list(parameters.values())
        if isinstance(clipping, ClipNorm):
            norm = full_value(self.setup.clip_norm(self.setup.model, tensors, clipping))
            return {"norm": norm, "clipped": _gradients(parameters)}
        if isinstance(clipping, ClipValue):
            nn.utils.clip_grad_value_(tensors, clipping.clip_value)
        return {}


def _gradients(parameters: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters.values()]


def _traced(step: Callable[[dict[str, Nest]], dict[str, Nest]], plan: Nest, tensors: list[torch.Tensor]) -> _Graph:
    """Trace a step on fake tensors, so that tracing computes and sends nothing."""
    results: list[Nest] = []

    def flattened_step(*values: torch.Tensor) -> list[torch.Tensor]:
        found, outputs = _taken_apart(step(_each(plan, partial(_rebuilt, values))))
        results.append(found)
        return outputs

    graph = make_fx(flattened_step, tracing_mode="fake")(*tensors)
    # Drop DTensor's shape computations: before torch 2.13 they are traced too, and may raise on uninitialised tokens.
    graph.graph.eliminate_dead_code(is_impure_node=_has_effect)
    graph.recompile()
    return _Graph(graph, results[-1])


def _has_effect(node: Node) -> bool:
    """Whether a node must stay although nothing uses its result, because other ranks may wait for its collective."""
    return node.is_impure() or "c10d" in str(node.target)


def _each(nest: Nest, change: Callable[[Any], Any]) -> Nest:
    """Apply a function to every value in a nest except None."""
    if isinstance(nest, dict):
        return {key: _each(value, change) for key, value in nest.items()}
    if isinstance(nest, list):
        return [_each(value, change) for value in nest]
    return None if nest is None else change(nest)


def _taken_apart(nest: Nest) -> tuple[Nest, list[torch.Tensor]]:
    """Replace tensors in a nest by `_Part`, and return the flat list of local tensors."""
    tensors: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> _Part:
        tensors.append(_local(tensor))
        return _Part(len(tensors) - 1, _rebuilder(tensor))

    return _each(nest, put), tensors


def _rebuilt(tensors: Sequence[torch.Tensor], part: _Part) -> torch.Tensor:
    return part.rebuilt(tensors[part.index])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rebuilder(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(tensor, DTensor):
        return lambda local: local
    return partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
