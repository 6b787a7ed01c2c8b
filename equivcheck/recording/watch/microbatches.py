"""Finds the microbatches: in each backward pass, the outermost module calls with their samples.

A call counts only if a backward pass goes through its output. Evaluations, a pipeline's forwards for shapes, and recomputed
forwards do not count.

Private torch API, tried on torch 2.9 to 2.15: `StorageWeakRef`, because storages have no public weak references.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from equivcheck.recording.tensors import local_of
from equivcheck.recording.watch.outputs import Outputs
from equivcheck.recording.watch.samples import hash_samples, tensors_in


class Call:
    """A module call that is not inside another module's call, such as a call to the full model."""

    def __init__(self, module: nn.Module, number: int) -> None:
        self.module, self.number = module, number
        self.hashes: torch.Tensor | None = None
        """The samples' hashes on the device; None if the module got no data."""
        self.is_counted = False
        """Whether a backward pass has come through."""
        self.outputs = Outputs()
        """Outputs of the modules inside."""


class Microbatches:
    """Finds the microbatches in a step, from module calls and backward passes. All threads of a process share one object."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._activations: set[StorageWeakRef] = set()
        self._owners = weakref.WeakSet[nn.Module]()
        self._num_calls = self._depth = self._num_gradients = 0
        self._reached: list[Call] = []
        self._is_repeated = False
        self._found: list[list[Call]] = []
        self.num_backwards = 0
        """Backward passes in this step. If one goes through known calls only, it does not count again."""

    @property
    def call(self) -> Call | None:
        """The outermost module call that is running in this thread; None if no module is running."""
        return getattr(self._local, "call", None)

    def is_inside(self, module: nn.Module) -> bool:
        """Whether another module's call is running in this thread."""
        return self.call is not None and self.call.module is not module

    def open(self, module: nn.Module) -> bool:
        """Record that a module call begins. Returns whether it is the outermost call in this thread."""
        # If the module itself is open, an exception ended its call, such as KeyboardInterrupt, and no hook was called.
        if self.is_inside(module):
            return False
        self._num_calls += 1
        if next(module.parameters(), None) is not None:
            self._owners.add(module)
        self._local.call = Call(module, self._num_calls)
        return True

    def close(self, module: nn.Module, inputs: Any, output: Any, *, is_wanted: bool) -> None:
        """Record that a module call ends.

        If `is_wanted`, the samples in `inputs` belong to the step's data once a backward pass goes through `output`. Only
        outermost calls to trainable modules have samples.
        """
        call = self.call
        if call is None or call.module is not module:
            return
        self._local.call = None
        outputs = list(tensors_in(output))
        if module not in self._owners:
            return
        data = [tensor for tensor in tensors_in(inputs) if not tensor.requires_grad and self._is_data(tensor)]
        own = set(map(_storage, data))  # a returned input stays data
        new = {storage for tensor in outputs if (storage := _storage(tensor)) is not None and storage not in own}
        alive = {storage for storage in self._activations if not storage.expired()}  # type: ignore[no-untyped-call]
        self._activations = alive | new  # a new set, because other threads may read the old one
        nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        # DDP over tensor parallelism keeps parameters as attributes that are no `Parameter`, from the first forward on.
        requires_grad = [parameter.requires_grad for parameter in module.parameters()] or [True]
        if not (is_wanted and nodes and any(requires_grad)):
            return
        call.hashes = hash_samples(data)
        for node in nodes:
            node.register_prehook(lambda _: self._reach(call))

    def _is_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has values and no model of this process computed it, as a generator computes discriminator inputs."""
        storage = _storage(tensor)
        return storage is not None and storage not in self._activations

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context for a backward pass. Backward passes inside it, such as those of reentrant checkpoints, belong to it."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                if self._reached or not self._is_repeated:
                    self._add(self._reached)
                self._reached, self._is_repeated = [], False

    @property
    def is_inside_backward(self) -> bool:
        """Whether a backward pass is running."""
        return bool(self._depth)

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """Context for `torch.autograd.grad`. Because it does not accumulate gradients, it does not count as a microbatch."""
        self._num_gradients += 1
        try:
            yield
        finally:
            self._num_gradients -= 1

    def _reach(self, call: Call) -> None:
        if self._num_gradients and not self._depth:
            return
        if call.is_counted:
            self._is_repeated = bool(self._depth) and (self._is_repeated or call not in self._reached)
        elif self._depth:
            self._reached.append(call)
        else:
            self._add([call])  # Megatron calls the engine without `torch.autograd.backward`
        call.is_counted = True

    def _add(self, calls: list[Call]) -> None:
        self.num_backwards += 1
        self._found.append(sorted(calls, key=lambda call: call.number))

    def take(self, roots: Container[int]) -> list[list[Call]]:
        """Return each microbatch's module calls whose inputs are samples, and begin a new step.

        Only calls to modules whose ids are in `roots` are returned. If a microbatch has no such call, only its first call with
        samples is returned, because later calls get activations or positions.
        """
        found, self._found, self.num_backwards = self._found, [], 0
        with_data = [[call for call in calls if call.hashes is not None] for calls in found]
        chosen = [[call for call in calls if id(call.module) in roots] or calls[:1] for calls in with_data]
        return [calls for calls in chosen if calls]


def _storage(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return a tensor's storage; None on the meta device, for a fake tensor, and inside a functorch transform."""
    try:
        storage = local_of(tensor).untyped_storage()
        return None if storage.device.type == "meta" else StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return None
