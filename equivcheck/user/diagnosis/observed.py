"""Runs a training once more, and counts backward passes, module calls and writes to buffers. Also records settings."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.update.settings import FLAGS, Settings, settings_of
from equivcheck.user.batches import convert_batch
from equivcheck.user.diagnosis.interception import intercept_backward
from equivcheck.user.loop import default_step, train
from equivcheck.user.precision.autograd_private import in_backward
from equivcheck.user.randomness import seed_generators
from equivcheck.user.ranks import build_model, reader_and_batches, task_and_mesh
from equivcheck.user.task import Task
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.optimizers import hook_steps, optimizers_in
from equivcheck.user.traces.reader import Reader
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks

COUNTS_BROADCASTS = "<2.12"
"""Torch versions in which DDP's broadcast of a buffer counts as an in-place operation on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run's optimizer settings, and how many backward passes and module calls it had."""

    num_backward: int
    """How many backward passes the first step had."""
    settings: tuple[Settings, ...]
    """Optimizer settings at each update; empty for a step without one."""
    calls: Mapping[str, int]
    """How many times each module is called in the first step, by name. Calls repeated by activation checkpointing count again."""
    writes: Mapping[str, int]
    """How many in-place operations write to each buffer in the first step, by name. DDP's broadcasts do not count."""


class ObservedRuns:
    """Further runs of a training, on one device and on ranks. Each starts when its result is first read."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @cached_property
    def ranks(self) -> tuple[ObservedRun, ...]:
        """Runs of all ranks in a simulated world. Empty if a rank fails."""
        counts = Counter[int]()
        with _counting(counts), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return tuple(ranks("sim", self._task.num_ranks).run(_observed_rank, self._task, counts).values)
            except RanksFailed:
                return ()

    @cached_property
    def device(self) -> ObservedRun:
        """The single-device run."""
        task, counts = self._task, Counter[int]()
        model = build_model(task)
        batches = [convert_batch(batch, task.dtype) for batch in task.batches]
        with _counting(counts), seed_generators(task.seed):
            return _observed(task, Reader(TensorNames(model), model), batches, counts, is_rank=False)


def _counting(counts: Counter[int]) -> Any:
    """Count each thread's backward passes, because simulated ranks are threads. Passes inside of a pass do not count."""

    def backward(_loss: object, run: Callable[[], None]) -> None:
        counts[threading.get_ident()] += not in_backward()
        run()

    return intercept_backward(backward)


def _observed_rank(task: Task, counts: Counter[int]) -> ObservedRun:
    task, mesh = task_and_mesh(task)
    return _observed(task, *reader_and_batches(task, mesh), counts, is_rank=True)


def _observed(task: Task, reader: Reader, batches: list[Any], counts: Counter[int], *, is_rank: bool) -> ObservedRun:
    calls = Counter[str]()
    passes: list[int] = []
    writes: dict[str, int] = {}
    settings: list[Settings] = []
    own = (task.rank_step if is_rank else task.step) or default_step(task)

    def observe(optimizer: Any) -> None:
        every = optimizers_in(optimizer)

        def record(*_: Any) -> None:
            settings[-1] = settings_of(every, reader.slots(), FLAGS)

        hook_steps(optimizer, record)

    def take_step(*arguments: Any) -> Any:
        before, buffers = counts[threading.get_ident()], [] if settings else _versions(reader)
        settings.append({})
        with ExitStack() as hooks:
            broadcasts = _count_broadcasts(reader, hooks) if buffers and is_torch_in(COUNTS_BROADCASTS) else Counter[str]()
            for name, module in reader.names.modules(reader.module) if len(settings) == 1 else ():
                hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: calls.update([name])).remove)
            value = own(*arguments)
        passes.append(counts[threading.get_ident()] - before)
        writes.update({name: buffer._version - version - broadcasts[name] for name, buffer, version in buffers})
        return value

    train(task.with_new_optimizers(observe), reader, batches, take_step, task.loss_scale if is_rank else 1.0)
    return ObservedRun(num_backward=passes[0], settings=tuple(settings), calls=dict(calls), writes=writes)


def _versions(reader: Reader) -> list[tuple[str, torch.Tensor, int]]:
    """Return the buffers with the number of in-place operations on each so far, which torch counts for autograd."""
    return [(name, buffer, buffer._version) for name, buffer in reader.names.buffers(reader.module)]


def _count_broadcasts(reader: Reader, hooks: ExitStack) -> Counter[str]:
    """Count DDP's broadcasts to each buffer until `hooks` are removed.

    DDP broadcasts between its own pre-forward hooks and those of the module that it wraps.
    """
    counts = Counter[str]()
    before: dict[str, int] = {}

    def start(*_: Any) -> None:
        before.update({name: version for name, _, version in _versions(reader)})

    def stop(*_: Any) -> None:
        counts.update({name: version - before[name] for name, _, version in _versions(reader) if name in before})
        before.clear()

    for module in reader.module.modules():
        if isinstance(module, DistributedDataParallel):
            hooks.callback(module.register_forward_pre_hook(start).remove)
            hooks.callback(module.module.register_forward_pre_hook(stop, prepend=True).remove)
    return counts
