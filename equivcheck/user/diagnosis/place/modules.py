"""Records inputs and outputs of each module at one step, with their gradients, in execution order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.training.read import local_values, pieces_of
from equivcheck.user.batches import tensors_of
from equivcheck.user.diagnosis.interception import call_before_clipping
from equivcheck.user.loop import default_step, train
from equivcheck.user.precision.autograd_private import in_backward
from equivcheck.user.ranks import reader_and_batches, task_and_mesh
from equivcheck.user.task import Task, TrainStep
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.trace import Piece, Snapshot


class Key(NamedTuple):
    """Key for one tensor of a module in a step: an input, an output, or the gradient of either."""

    module: str
    """The module's name; empty for the full model."""
    call: int
    """How many times the module was called before in the step."""
    is_input: bool
    """Whether the tensor is an input. If not, it is an output."""
    number: int
    """Index among the module's inputs or outputs."""
    is_gradient: bool
    """Whether this is the input's or output's gradient."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModuleTensor:
    """A module's input or output, or its gradient, on one rank."""

    key: Key
    """The tensor's name."""
    piece: Piece | None
    """Position in the full tensor, from DTensor placements or from the shard of a layer's weight. None if unknown."""
    values: torch.Tensor
    """This rank's elements in float64."""
    node: Any = None
    """Autograd node that made the tensor. None for a gradient, for a tensor without a node, and on ranks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WatchedRun:
    """A run in which modules' inputs and outputs were recorded at one step."""

    trace: UserTrace
    """The run's trace."""
    seen: tuple[ModuleTensor, ...]
    """Recorded inputs, outputs and gradients, in execution order."""
    unclipped: Snapshot | None
    """Gradients before the first `clip_grad_norm_`; None if the step does not call it."""


class _Watch:
    def __init__(self, reader: Reader, step: TrainStep, at: int, *, keeps_nodes: bool = False) -> None:
        self.seen: list[ModuleTensor] = []
        self.unclipped: Snapshot | None = None
        self._reader, self._step, self._at, self._index, self._keeps_nodes = reader, step, at, -1, keeps_nodes
        modules = reader.names.modules(reader.module)
        self._modules = [(path, owner) for path, owner in modules if not isinstance(owner, nn.ModuleList)]
        self._calls: dict[str, int] = {}

    def step(self, *arguments: Any) -> Any:
        """Run a step, and record it if it is the selected one."""
        self._index += 1
        if self._index != self._at:
            return self._step(*arguments)
        with self._hooked(), call_before_clipping(self._read_unclipped):
            return self._step(*arguments)

    def run(self, trace: UserTrace) -> WatchedRun:
        """Return the watched run: its trace, and the module tensors and gradients recorded at the selected step."""
        return WatchedRun(trace=trace, seen=tuple(self.seen), unclipped=self.unclipped)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        hooks = []
        for path, owner in self._modules:
            hooks.append(owner.register_forward_pre_hook(self._before(path), with_kwargs=True))
            hooks.append(owner.register_forward_hook(self._after(path)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _read_unclipped(self) -> None:
        if self.unclipped is None:
            self.unclipped = self._reader.gradients(self._reader.known_parameters())

    def _before(self, path: str) -> Callable[..., Any]:
        def hook(owner: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if in_backward():  # activation checkpointing runs the module again
                return None
            self._calls[path] = self._calls.get(path, -1) + 1
            given = [*arguments, *keywords.values()]
            views = {id(value): _view_of(value) for value in given}
            self._keep_all(owner, path, [views[id(value)] for value in given], is_input=True)
            return tuple(views[id(value)] for value in arguments), {key: views[id(each)] for key, each in keywords.items()}

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(owner: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not in_backward():
                self._keep_all(owner, path, outputs, is_input=False)

        return hook

    def _keep_all(self, owner: nn.Module, path: str, values: Any, *, is_input: bool) -> None:
        for number, tensor in enumerate(tensors_of(values)):
            if not tensor.is_complex():
                key = Key(path, self._calls[path], is_input, number, is_gradient=False)
                self._keep(owner, key, tensor)
                if tensor.requires_grad:
                    keep = partial(self._keep, owner, key._replace(is_gradient=True))
                    tensor.register_hook(keep)  # type: ignore[no-untyped-call]

    def _keep(self, owner: nn.Module, key: Key, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            pieces = pieces_of(key.module, tensor) if isinstance(tensor, DTensor) else ()
            values = local_values(tensor).double().clone()
            piece = pieces[0] if len(pieces) == 1 else None if pieces else self._piece_by_weight(owner, key, values)
        node = tensor.grad_fn if self._keeps_nodes and not key.is_gradient else None
        self.seen.append(ModuleTensor(key=key, piece=piece, values=values, node=node))

    def _piece_by_weight(self, owner: nn.Module, key: Key, values: torch.Tensor) -> Piece | None:
        """Return a plain tensor's position along its last dim, if the layer's weight is sharded along the matching dim."""
        weight = owner._parameters.get("weight")
        if weight is None or not isinstance(owner, nn.Linear) or not values.dim():
            return None
        dim = 1 if key.is_input else 0
        box, *others = self._reader.pieces_of_parameter(f"{key.module}.weight".lstrip("."), weight)
        if others or not box.start or box.size[dim] in (box.shape[dim], 0) or box.size[dim] != values.shape[-1]:
            return None
        before = values.shape[:-1]
        shape, start = (*before, box.shape[dim]), (*(0 for _ in before), box.start[dim])
        return Piece(name=key.module, shape=shape, start=start, size=tuple(values.shape))


def _view_of(value: Any) -> Any:
    """Return a view whose gradient contains only the part from this module, without the parts from other users of the tensor."""
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value


def watched_rank(task: Task, at: int) -> WatchedRun:
    """Train on this rank, and record modules' inputs and outputs at step `at`."""
    task, mesh = task_and_mesh(task)
    reader, batches = reader_and_batches(task, mesh)
    watch = _Watch(reader, task.rank_step or default_step(task), at)
    return watch.run(train(task, reader, batches, watch.step, task.loss_scale))


def watched_device(task: Task, at: int, model: nn.Module, batches: list[Any], *, keeps_nodes: bool = False) -> WatchedRun:
    """Train on one device, and record modules' inputs and outputs at step `at`.

    With `keeps_nodes`, autograd nodes are recorded as well.
    """
    reader = Reader(TensorNames(model), model)
    watch = _Watch(reader, task.step or default_step(task), at, keeps_nodes=keeps_nodes)
    return watch.run(train(task, reader, batches, watch.step, 1.0))
