"""The training function for every rank."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from equivcheck.user.batches import converted, data_number, share_of
from equivcheck.user.conversion import complex_parameter, convert_model
from equivcheck.user.loop import train
from equivcheck.user.precision.seen import LowPrecisionSeen, policy_of
from equivcheck.user.randomness.generators import seeded
from equivcheck.user.randomness.masks import Cut, mask_dropout
from equivcheck.user.task import Task
from equivcheck.user.traces.cuts import Parts
from equivcheck.user.traces.names import Names
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.usage import invalid
from equivcheck.worlds.meshes import device_mesh


def rank_trace(task: Task) -> UserTrace:
    """Train on this rank and return its trace."""
    mesh = device_mesh(task.shape, task.axis_names)
    names, module = rank_module(task, mesh)
    batches = [share_of(task, converted(batch, task.dtype), mesh) for batch in task.batches]
    scale = float(task.num_data_ranks) if task.reduction == "sum" else 1.0
    seen = LowPrecisionSeen()
    with seen.watching(module):
        trace = train(task, rank_reader(task, names, module, mesh), batches, task.rank_step, scale)
    casting = tuple(name for name, each in names.all_modules(module) if isinstance(each, FSDPModule))
    return replace(trace, low_precision=policy_of(module) or seen.precision, casting=casting)


def process_trace(task: Task) -> UserTrace:
    """Run `rank_trace`, then reset Dynamo.

    The process also runs later trainings. Dynamo counts recompilations per function and falls back to eager after a few.
    """
    import torch._dynamo

    try:
        return rank_trace(task)
    finally:
        torch._dynamo.reset()


def rank_reader(task: Task, names: Names, module: nn.Module, mesh: DeviceMesh) -> Reader:
    """Return a reader for this rank's tensors. Raises `UsageError` if `cuts` does not fit the model."""
    parts = None if task.cuts is None else Parts(task.cuts, names.shapes, mesh)
    return Reader(names, module, task.full_tensors, parts)


def rank_module(task: Task, mesh: DeviceMesh) -> tuple[Names, nn.Module]:
    """Return the tensor names in the model, and the parallelized module."""
    model = build(task, Cut(data_number(task, mesh), task.num_data_ranks))
    names = Names(model)
    return names, parallelized(task, model, mesh)


def build(task: Task, cut: Cut | None = None) -> nn.Module:
    """Build the user's model in the task's element type.

    `cut` selects the rows for dropout masks; None selects all rows. Raises `UsageError` if the result is not a module or has
    complex parameters.
    """
    with seeded(task.seed):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise invalid("model", f"it returned {model!r:.100}", "a torch.nn.Module")
    refused = complex_parameter(model)
    if refused:
        raise invalid("model", f"parameter {refused} is complex", "real parameters; buffers may be complex")
    if task.mask_shapes is not None:
        mask_dropout(model, task.seed, task.mask_shapes, cut or Cut())
    return model if task.dtype is None else convert_model(model, task.dtype)


def parallelized(task: Task, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Call the user's `parallelize` and return the module to train. Raises `UsageError` if it returns another type."""
    module = task.parallelize(model, mesh)
    if module is None:
        return model
    if not isinstance(module, nn.Module):
        raise invalid(
            "parallelize", f"it returned {module!r:.100}", "a torch.nn.Module, or None if it changes the model in place"
        )
    return module
