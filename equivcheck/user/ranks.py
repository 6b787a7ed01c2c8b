"""The function that trains on each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from equivcheck.user.batches import complex_parameter, convert_batch, convert_model, part_number, rank_batch
from equivcheck.user.frames import module_in_errors
from equivcheck.user.loop import train
from equivcheck.user.precision.policy import PrecisionObserver, policy_of
from equivcheck.user.randomness import RowShard, mask_dropout, seed_generators
from equivcheck.user.resuming.parts import WHOLE, Part
from equivcheck.user.task import Task, with_mesh
from equivcheck.user.traces.cuts import ShardBoxes
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.usage import invalid
from equivcheck.worlds.meshes import device_mesh


def rank_trace(task: Task, part: Part = WHOLE) -> UserTrace:
    """Train on this rank, and return its trace. `part` says which steps to run."""
    task, mesh = task_and_mesh(task)
    reader, batches = reader_and_batches(task, mesh)
    names, module, seen = reader.names, reader.module, PrecisionObserver()
    with seen.watching(module), module_in_errors(names, module):
        trace = train(task, reader, batches, task.rank_step, task.loss_scale, part)
    casting = tuple(name for name, each in names.all_modules(module) if isinstance(each, FSDPModule))
    return replace(trace, low_precision=policy_of(module) or seen.precision, casting=casting)


def task_and_mesh(task: Task) -> tuple[Task, DeviceMesh]:
    """Return this rank's mesh, and the task with this mesh bound to all functions that have a parameter ``mesh``."""
    mesh = device_mesh(task.shape, task.axis_names)
    optimizer = task.optimizer if task.rank_optimizer is None else with_mesh(task.rank_optimizer, mesh)
    step, loss = with_mesh(task.rank_step, mesh), with_mesh(task.loss, mesh)
    return replace(task, rank_step=step, loss=loss, optimizer=optimizer), mesh


def reader_and_batches(task: Task, mesh: DeviceMesh) -> tuple[Reader, list[Any]]:
    """Return a reader for this rank's parallelized module, and this rank's batches."""
    names, module = rank_module(task, mesh)
    batches = [rank_batch(task, convert_batch(batch, task.dtype), mesh) for batch in task.batches]
    return rank_reader(task, names, module, mesh), batches


def process_trace(task: Task, part: Part = WHOLE) -> UserTrace:
    """Train on this rank, return its trace, and reset Dynamo.

    The process also runs later trainings. Without the reset, Dynamo would stop compiling functions after a few recompilations.
    """
    import torch._dynamo

    try:
        return rank_trace(task, part)
    finally:
        torch._dynamo.reset()


def rank_reader(task: Task, names: TensorNames, module: nn.Module, mesh: DeviceMesh) -> Reader:
    """Return a reader for this rank's tensors. Raises `UsageError` if the user's argument `cuts` does not fit the model."""
    parts = None if task.cuts is None else ShardBoxes(task.cuts, names.shapes, mesh)
    return Reader(names, module, task.full_tensors, parts)


def rank_module(task: Task, mesh: DeviceMesh) -> tuple[TensorNames, nn.Module]:
    """Build the user's model on this rank and parallelize it. Returns its tensor names and the parallelized module."""
    model = build_model(task, RowShard(part_number(task, mesh), task.num_data_ranks))
    names = TensorNames(model)
    with module_in_errors(names, model):
        return names, parallelize_model(task, model, mesh)


def build_model(task: Task, cut: RowShard | None = None) -> nn.Module:
    """Build the user's model in the task's element type.

    `cut` selects the rows for dropout masks; None selects all rows. Raises `UsageError` if the result is not a module or has
    complex parameters.
    """
    with seed_generators(task.seed):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise invalid("model", f"it returned {model!r:.100}", "a torch.nn.Module")
    refused = complex_parameter(model)
    if refused:
        raise invalid("model", f"parameter {refused} is complex", "real parameters; buffers may be complex")
    if task.mask_shapes is not None:
        mask_dropout(model, task.seed, task.mask_shapes, cut or RowShard())
    return model if task.dtype is None else convert_model(model, task.dtype)


def parallelize_model(task: Task, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Call the user's `parallelize`, and return the module to train.

    Raises `UsageError` if the result is not a module or None.
    """
    module = task.parallelize(model, mesh)
    if module is None:
        return model
    if not isinstance(module, nn.Module):
        raise invalid(
            "parallelize", f"it returned {module!r:.100}", "a torch.nn.Module, or None if it changes the model in place"
        )
    return module
