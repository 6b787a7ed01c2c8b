"""Record module outputs and output gradients at one step, in execution order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.training.read import local_values, pieces_of
from equivcheck.user.batches import convert_batch, rank_batch, tensors_of
from equivcheck.user.loop import default_step, train
from equivcheck.user.ranks import rank_module, rank_reader
from equivcheck.user.task import Task, TrainStep
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.trace.trace import Piece


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModuleTensor:
    """A module's output or output gradient on one rank."""

    module: str
    """Module name; empty for the full model."""
    call: int
    """Number of the module's call in the step, from 0."""
    is_gradient: bool
    """Whether this is the output gradient."""
    piece: Piece | None
    """Position in the full tensor; None if unknown."""
    values: torch.Tensor
    """This rank's elements in float64."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WatchedRun:
    """A run with the tensors recorded at one step."""

    trace: UserTrace
    """Trace of the run."""
    seen: tuple[ModuleTensor, ...]
    """Recorded tensors in execution order."""


class _Watch:
    def __init__(self, names: TensorNames, module: nn.Module, step: TrainStep, at: int) -> None:
        self.seen: list[ModuleTensor] = []
        self._step, self._at, self._index = step, at, -1
        self._modules = [(path, owner) for path, owner in names.modules(module) if not isinstance(owner, nn.ModuleList)]
        self._calls: dict[str, int] = {}

    def step(self, *arguments: Any) -> Any:
        """Run a step, and record it if it is the selected one."""
        self._index += 1
        if self._index != self._at:
            return self._step(*arguments)
        with self._hooked():
            return self._step(*arguments)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        hooks = [owner.register_forward_hook(self._hook(path)) for path, owner in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, path: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            output = next((tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()), None)
            if output is None:
                return
            call = self._calls[path] = self._calls.get(path, -1) + 1
            self._keep(path, call, output, is_gradient=False)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._keep(path, call, gradient, is_gradient=True))  # type: ignore[no-untyped-call]

        return hook

    def _keep(self, path: str, call: int, tensor: torch.Tensor, *, is_gradient: bool) -> None:
        with torch.no_grad():
            pieces = pieces_of(path, tensor) if isinstance(tensor, DTensor) else ()
            values = local_values(tensor).double().clone()
        self.seen.append(
            ModuleTensor(
                module=path, call=call, is_gradient=is_gradient, piece=pieces[0] if len(pieces) == 1 else None, values=values
            )
        )


def watched_rank(task: Task, at: int) -> WatchedRun:
    """Train on this rank and record step `at`."""
    mesh = device_mesh(task.shape, task.axis_names)
    names, module = rank_module(task, mesh)
    batches = [rank_batch(task, convert_batch(batch, task.dtype), mesh) for batch in task.batches]
    watch = _Watch(names, module, task.rank_step or default_step(task), at)
    trace = train(task, rank_reader(task, names, module, mesh), batches, watch.step, task.loss_scale)
    return WatchedRun(trace=trace, seen=tuple(watch.seen))


def watched_device(task: Task, at: int, model: nn.Module, batches: list[Any]) -> WatchedRun:
    """Train on one device and record step `at`."""
    watch = _Watch(TensorNames(model), model, task.step or default_step(task), at)
    trace = train(task, Reader(TensorNames(model), model), batches, watch.step, 1.0)
    return WatchedRun(trace=trace, seen=tuple(watch.seen))
