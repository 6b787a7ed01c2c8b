"""`Recorder`: follow a training loop step by step.

Private torch API, tried on torch 2.9, 2.13 and 2.15: `clip_grad._clip_grads_with_norm_`, which `clip_grad_norm_` calls with the
parameters and their norm before it scales, and which is also `nn.utils.clip_grads_with_norm_`. There is no public hook.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from equivcheck.errors import EquivCheckError
from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.tensors import (
    Row,
    buffers_of,
    find_root,
    gradients_of,
    local_loss,
    move_parameters,
    slots_of,
    state_of,
)
from equivcheck.recording.trace import Entry, Header, Moment, RecordedStep
from equivcheck.recording.trace_file import TraceWriter
from equivcheck.recording.watch.access import has_values, leave_no_mark
from equivcheck.worlds.trace.trace import Slot

_VARIABLES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "ATEN_CPU_CAPABILITY")
"""Environment variables that may change values."""


class Recorder:
    """Reads a process's training at each step, and writes a trace. The training is not ours, and none of its values changes."""

    is_active = False
    """Whether this process already records."""

    def __init__(self, folder: Path, wanted: range, moved: int, adapter: Adapter) -> None:
        self._folder, self._wanted, self._moved, self._adapter = folder, wanted, moved, adapter
        self._writer: TraceWriter | None = None
        self._roots: list[nn.Module] = []
        self._slots: tuple[Slot, ...] = ()
        self._step = 0
        self._has_updated = False
        self._is_due = False
        self._is_over = False
        self._process: int | None = None
        self._entries: list[Entry] = []
        self._losses: list[torch.Tensor] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch this process's module calls, backward passes, clipping and optimizer steps."""
        own_backward, own_clip = torch.autograd.backward, clip_grad._clip_grads_with_norm_
        own_flat_clip = FullyShardedDataParallel.clip_grad_norm_
        handles = (
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        )

        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
            self._guard(lambda: self._note_losses(tensors))
            own_backward(tensors, *arguments, **keywords)

        def clip(parameters: Any, max_norm: float, norm: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
            own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._guard(lambda: self._before_clipping(own))
            own_clip(own, max_norm, norm, *arguments, **keywords)

        def clip_flat(module: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
            parameters = list(module.parameters())
            self._guard(lambda: self._before_clipping(parameters))
            return own_flat_clip(module, *arguments, **keywords)

        torch.autograd.backward, clip_grad._clip_grads_with_norm_ = backward, clip  # type: ignore[assignment]
        nn.utils.clip_grads_with_norm_ = clip  # type: ignore[assignment]
        FullyShardedDataParallel.clip_grad_norm_ = clip_flat  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.autograd.backward, clip_grad._clip_grads_with_norm_ = own_backward, own_clip
            nn.utils.clip_grads_with_norm_ = own_clip
            FullyShardedDataParallel.clip_grad_norm_ = own_flat_clip  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    def finish(self) -> None:
        """Write the last step and close the file."""
        self._guard(self._end)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a part. An error ends the recording, never the job."""
        # A forked process has this recorder as well: it may train, unless its parent does.
        if self._is_over or self._process not in {None, os.getpid()} or not has_values():
            return
        try:
            with leave_no_mark():
                if self._is_due:
                    self._end_step()
                if not self._is_over:
                    work()
        except BaseException as error:
            self._stop()
            if not isinstance(error, Exception):
                raise  # the user interrupts the job
            why = str(error) if isinstance(error, EquivCheckError) else f"{type(error).__name__}: {error}"
            print(f"equivcheck: recording ended at step {self._step}: {why}", file=sys.stderr)

    def _stop(self) -> None:
        self._is_over = True
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    @property
    def _is_wanted(self) -> bool:
        return self._step in self._wanted

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the compiler must not trace this hook into the graph
            return
        if self._has_updated:
            self._is_due = True  # without values, as inside `torch.func` transforms, the step ends later
            self._guard(lambda: None)
        elif not self._roots and torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters()):
            # The first module that is called to be trained is the model: modules inside are called after it.
            self._guard(lambda: self._begin(module))

    def _begin(self, root: nn.Module) -> None:
        self._process = os.getpid()
        self._add_root(root)
        if self._moved:
            move_parameters(self._adapter.rows_to_move(self._slots), self._moved - 1)
        if self._is_wanted:
            self._read_start(self._slots)

    def _read_start(self, slots: Sequence[Slot]) -> None:
        self._read(Moment.START, [(slot.pieces, slot.parameter) for slot in slots], exactly=True)

    def _add_root(self, root: nn.Module) -> None:
        """Watch a module's parameters. It replaces modules inside it; beside others its parameters get a prefix."""
        inside = set(map(id, root.modules()))
        self._roots = [*(each for each in self._roots if id(each) not in inside), root]
        found = (slots_of(each, f"module{number}." if number else "") for number, each in enumerate(self._roots))
        self._slots = tuple(slot for slots in found for slot in slots)
        self._adapter.learn(self._roots, self._slots, self._buffers())

    def _note_losses(self, tensors: Any) -> None:
        if self._is_wanted:
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self._losses += [local_loss(tensor) for tensor in given if tensor.numel() == 1]

    def _before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        if self._is_wanted:
            self._read(Moment.UNCLIPPED, gradients_of(self._slots_for(parameters)))

    def _before_update(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        if torch.compiler.is_compiling() or not self._is_wanted:
            return None
        own, *rest = arguments
        closure = rest[0] if rest else keywords.get("closure")
        if closure is None:
            self._guard(lambda: self._read_gradients(optimizer))
            return None
        is_first = True

        def evaluate() -> Any:
            # The optimizer finds the gradients that the closure makes, and may call it several times.
            nonlocal is_first
            loss = closure()
            if is_first:
                self._guard(lambda: self._read_gradients(optimizer))
            is_first = False
            return loss

        return ((own, evaluate, *rest[1:]), keywords) if rest else (arguments, keywords | {"closure": evaluate})

    def _read_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = {id(slot.parameter) for slot in (*self._slots, *self._adapter.copies)}
        if unknown := [parameter for parameter in parameters if id(parameter) not in known]:
            if (found := find_root(parameters)) is not None:
                self._add_root(found)
            else:
                self._adapter.adopt_copies(unknown, self._slots)
            if self._step == 0:  # not updated so far
                self._read_start([slot for slot in self._slots_for(parameters) if id(slot.parameter) not in known])
        self._read(Moment.GRADIENT, gradients_of(self._slots_for(parameters)))

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._has_updated = True  # if the step is compiled, its graph does this as well
        if not torch.compiler.is_compiling():
            self._optimizers[id(optimizer)] = optimizer

    def _end_step(self) -> None:
        if self._is_wanted:
            self._adapter.require_right_copies()
            self._read(Moment.UPDATE, [(slot.pieces, slot.parameter) for slot in (*self._slots, *self._adapter.copies)])
            self._write()
        self._has_updated, self._is_due, self._step = False, False, self._step + 1
        if self._step == self._wanted.stop:
            self._end()

    def _end(self) -> None:
        """Write the last step, with optimizer state and buffers, which are compared at the end only."""
        if self._has_updated:
            self._end_step()
        if self._writer is not None and not self._is_over:
            for optimizer in self._optimizers.values():
                self._read(Moment.STATE, state_of(optimizer, (*self._slots, *self._adapter.copies)))
            self._read(Moment.BUFFER, self._buffers(), exactly=True)
            self._step -= 1
            self._write()
        self._stop()

    def _write(self) -> None:
        if self._writer is None:
            num_steps = None if self._wanted.stop == sys.maxsize else len(self._wanted)
            header = replace(_header(), num_steps=num_steps, moved=self._moved, notes=self._adapter.notes)
            self._writer = TraceWriter(self._folder, header)
        losses = tuple(map(float, self._losses))
        self._writer.write(RecordedStep(step=self._step, losses=losses, entries=tuple(self._entries)))
        self._entries.clear()
        self._losses.clear()

    def _slots_for(self, parameters: Sequence[torch.Tensor]) -> list[Slot]:
        wanted = set(map(id, parameters))
        return [slot for slot in (*self._slots, *self._adapter.copies) if id(slot.parameter) in wanted]

    def _buffers(self) -> list[Row]:
        return [row for number, root in enumerate(self._roots) for row in buffers_of(root, f"module{number}." if number else "")]

    def _read(self, moment: Moment, rows: Sequence[Row], *, exactly: bool = False) -> None:
        self._entries += self._adapter.entries(moment, rows, exactly=exactly)


def _header() -> Header:
    has_ranks = dist.is_available() and dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Header(rank=rank, num_ranks=num_ranks, argv=tuple(sys.argv), environment=facts)
