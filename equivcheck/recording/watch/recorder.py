"""`Recorder`: follow a training loop step by step, and write each step to a trace."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equivcheck.errors import EquivCheckError
from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.trace import RecordedStep
from equivcheck.recording.trace_file import TraceWriter
from equivcheck.recording.watch.access import has_values, leave_no_mark
from equivcheck.recording.watch.header import make_header
from equivcheck.recording.watch.microbatches import Microbatches
from equivcheck.recording.watch.reader import Reader


class Recorder:
    """Follows a training process step by step, and writes its trace. The recorder changes no value in the training.

    `hooks.install_hooks` arranges the calls to its public methods. A method with the argument `own` replaces a function in torch;
    `own` is torch's original function.
    """

    is_active = False
    """Whether this process already records."""

    def __init__(  # noqa: PLR0913 - options, all by keyword
        self, folder: Path, adapter: Adapter, *, steps: int | None, from_step: int, moved: int, outputs: str
    ) -> None:
        self._folder, self._adapter, self._num_steps, self._moved = folder, adapter, steps, moved
        self._wanted = range(from_step, sys.maxsize if steps is None else from_step + steps)
        self._patterns = outputs.split(",") if outputs else []
        self._writer: TraceWriter | None = None
        self._reader, self._microbatches = Reader(adapter, moved), Microbatches()
        self._norm_type = 2.0
        self._step = 0
        self._process: int | None = None
        self._dtypes: set[torch.dtype] = set()
        self._has_called = self._has_updated = self._is_due = self._is_over = False

    def finish(self) -> None:
        """Write the record of the last step, and close the trace file."""
        self._guard(self._end)

    def _guard(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run a part of the recording. An error ends the recording, but not the job."""
        # A forked process has this recorder as well: it may train, unless its parent does.
        if self._is_over or self._process not in {None, os.getpid()} or not has_values():
            return
        try:
            with leave_no_mark():
                if self._is_due:
                    self._end_step()
                if not self._is_over:
                    work(*arguments)
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

    # Module calls

    def before_forward(self, module: nn.Module, _inputs: Any) -> None:
        """Before a module call: end the step if an optimizer has stepped, and find the model's parameters."""
        # Optimizers may step inside a backward pass, which may run forwards again. Without values, the step ends later.
        self._is_due = self._has_updated and not self._microbatches.is_inside_backward
        if self._is_due or self._patterns or not self._microbatches.is_inside(module):
            self._guard(self._before_forward, module, torch.is_grad_enabled())

    def _before_forward(self, module: nn.Module, is_trained: bool) -> None:
        self._has_called = True
        is_outermost = self._microbatches.open(module)
        if self._patterns and (call := self._microbatches.call) is not None:
            call.outputs.enter()
        if is_outermost and not self._microbatches.is_inside_backward:
            if self._is_updated_by_hand():
                self._end_step()
            if is_trained:
                self._process = os.getpid()
                self._reader.watch_called(module, is_wanted=self._is_wanted)

    def after_forward(self, module: nn.Module, inputs: Any, *rest: Any) -> None:
        """After a module call: hash its samples if it is an outermost call, and sketch its output.

        If the call raised an exception, torch passes no keyword arguments to this hook, and there is no output.
        """
        if self._writer is None and isinstance(rest[-1], torch.Tensor) and rest[-1].is_floating_point():
            self._dtypes.add(rest[-1].dtype)
        if self._patterns or not self._microbatches.is_inside(module):
            keywords, output = rest if len(rest) > 1 else ({}, None)
            self._guard(self._after_forward, module, (inputs, keywords), output)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._patterns and (call := self._microbatches.call) is not None:
            name = self._reader.models.module_names.get(id(module)) if self._is_wanted else None
            is_chosen = name is not None and any(fnmatchcase(name, pattern) for pattern in self._patterns)
            call.outputs.leave(name if is_chosen else None, output)
        self._microbatches.close(module, inputs, output, is_wanted=self._is_wanted)

    def compile(self, own: Callable[..., None], module: nn.Module, *arguments: Any, **keywords: Any) -> None:
        """Replace `nn.Module.compile`: compile a module in place.

        Because torch calls no hook around a compiled module, the recorder's hooks are called here.
        """
        own(module, *arguments, **keywords)
        compiled: Any = module._compiled_call_impl

        def call(*inputs: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*inputs, **named)
            self.before_forward(module, inputs)
            output = compiled(*inputs, **named)
            self.after_forward(module, inputs, named, output)
            return output

        module._compiled_call_impl = call

    # Backward passes

    def backward(self, own: Callable[..., None], tensors: Any, *arguments: Any, **keywords: Any) -> None:
        """Replace `torch.autograd.backward`: read losses and accumulated gradients, then run the backward pass."""
        if not self._microbatches.is_inside_backward:
            # If the whole model is compiled, no module call was seen.
            self._is_due = self._is_due or (self._has_updated and not self._has_called)
            self._guard(self._before_backward, tensors)
        with self._microbatches.backward():
            own(tensors, *arguments, **keywords)
        if not self._microbatches.is_inside_backward:
            self._guard(self._read_by_hand)

    def _before_backward(self, tensors: Any) -> None:
        if self._is_wanted:
            self._reader.read_before_backward(tensors, self._microbatches.num_backwards)

    def _read_by_hand(self) -> None:
        if self._is_wanted:
            self._reader.read_by_hand()

    def gradients(self, own: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Replace `torch.autograd.grad`: compute gradients without counting a microbatch."""
        with self._microbatches.gradients():
            return own(*arguments, **keywords)

    # Clipping

    def total_norm(self, own: Callable[..., Any], tensors: Any, norm_type: float = 2.0, *rest: Any, **keywords: Any) -> Any:
        """Replace the function with which `clip_grad_norm_` computes a norm, and remember the norm's type for `clip`."""
        self._norm_type = float(norm_type)
        return own(tensors, norm_type, *rest, **keywords)

    def clip(
        self, own: Callable[..., None], parameters: Any, max_norm: float, total_norm: Any, *rest: Any, **keywords: Any
    ) -> None:
        """Replace the function with which `clip_grad_norm_` scales gradients: read the gradients, then clip them."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._guard(self._before_clipping, parameters)
        own(parameters, max_norm, total_norm, *rest, **keywords)
        self._guard(self._after_clipping, total_norm, max_norm, self._norm_type)

    def clip_flat(self, own: Callable[..., Any], module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Any:
        """Replace FSDP1's `clip_grad_norm_`: read the gradients of the flat parameters, then clip them."""
        num_clips = len(self._reader.record.clips)
        self._guard(self._before_clipping, list(module.parameters()))
        norm = own(module, max_norm, norm_type)
        if len(self._reader.record.clips) == num_clips:  # without shards, FSDP1 calls `clip_grad_norm_`
            self._guard(self._after_clipping, norm, max_norm, norm_type)
        return norm

    def _before_clipping(self, parameters: Any) -> None:
        if self._is_wanted:
            self._reader.read_unclipped(parameters)

    def _after_clipping(self, norm: Any, max_norm: float, norm_type: float) -> None:
        if self._is_wanted:
            self._reader.record.clips.append((norm, float(max_norm), float(norm_type)))
            self._reader.read_by_hand()

    # Updates

    def before_update(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        """Read gradients and settings before an optimizer's step.

        If the script passes a closure, gradients are read after the closure's first call.
        """
        own, *rest = arguments
        closure = rest[0] if rest else keywords.get("closure")
        if closure is None or self._is_over:
            self._guard(self._read_update, optimizer)
            return None
        is_first = True

        def evaluate() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                self._guard(self._read_update, optimizer)
            is_first = False
            return loss

        return ((own, evaluate, *rest[1:]), keywords) if rest else (arguments, keywords | {"closure": evaluate})

    def _read_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._reader.read_update(optimizer, is_wanted=self._is_wanted)

    def after_update(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        """Record that an optimizer has stepped, so that the next forward pass begins a new step."""
        self._reader.optimizers[id(optimizer)] = optimizer
        self._has_updated = True

    def scaled_step(self, own: Callable[..., Any], scaler: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
        """Replace `GradScaler.step`: run it, and record whether it skips the optimizer's update."""
        had_updated, self._has_updated = self._has_updated, False
        result = own(scaler, optimizer, *rest, **keywords)
        if not self._has_updated:
            self._guard(self._note_skipped, optimizer)
        self._has_updated = self._has_updated or had_updated
        return result

    def _note_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._reader.is_skipped(optimizer):
            self._reader.record.num_skipped += 1
            self.after_update(optimizer, None, None)

    def _is_updated_by_hand(self) -> bool:
        return bool(self._microbatches.num_backwards) and self._reader.is_updated_by_hand()

    # Steps

    def _end_step(self) -> None:
        is_next_wanted = self._step + 1 == self._wanted.start
        if self._is_wanted or is_next_wanted or not self._reader.optimizers:
            self._reader.read_parameters()
        num_backwards = self._microbatches.num_backwards
        microbatches = self._microbatches.take({id(root) for root in self._reader.models.roots})
        if self._is_wanted:
            self._write(self._reader.record.to_recorded_step(self._step, microbatches, num_backwards))
        elif is_next_wanted:  # the first recorded step begins with these parameters
            self._write(self._reader.record.to_recorded_step(self._step, (), 0))
        self._reader.begin_step()
        self._has_called = self._has_updated = self._is_due = False
        self._step += 1
        if self._step == self._wanted.stop:
            self._end()

    def _end(self) -> None:
        """Write the last step, with optimizer state and buffers, which are compared at the end only."""
        if self._has_updated or self._is_updated_by_hand():
            self._end_step()
        if self._is_over:
            return
        if self._writer is None:
            self._say_why_empty()
        else:
            self._reader.begin_step()
            self._reader.read_end()
            self._write(self._reader.record.to_recorded_step(self._step - 1, (), self._microbatches.num_backwards))
        self._stop()

    def _say_why_empty(self) -> None:
        """Print why nothing was recorded. Nothing is printed if this process trains nothing, such as a launcher."""
        if self._step:
            why = f"the training took {self._step} steps, and the first step to record is {self._wanted.start}"
        else:
            why = "backward passes ran, but no optimizer of torch made a step, and no watched parameter changed"
        if self._step or self._microbatches.num_backwards:
            print(f"equivcheck: nothing was recorded in {self._folder}: {why}", file=sys.stderr)

    def _write(self, step: RecordedStep) -> None:
        if self._writer is None:
            self._writer = TraceWriter(
                self._folder, make_header(self._dtypes, num_steps=self._num_steps, moved=self._moved, notes=self._adapter.notes)
            )
        self._writer.write(step)
