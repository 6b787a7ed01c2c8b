"""Asks the spmd_types type checker about a training whose parameters have its types.

It runs one rank's step without the other ranks, on types instead of numbers, and stops at the first operation with incompatible
types. See https://github.com/meta-pytorch/spmd_types.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.user.batches import convert_batch, map_tensors, rank_batch
from equivcheck.user.frames import deepest_line
from equivcheck.user.loop import build_optimizer, default_step
from equivcheck.user.ranks import rank_module, task_and_mesh
from equivcheck.user.task import Task
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.fake.ranks import FakeRanks

CHECKER = "spmd_types"
REFUSES = f"{CHECKER} rejects {{place}}: {{words}}"
ACCEPTS = f"{CHECKER} accepts your step: the error is in values, or in tensors without types"


def opinion_of_types(task: Task) -> str:
    """Return the spmd_types checker's error with its line in the code, or a sentence that the checker accepts the step.

    Empty if no parameter has an spmd_types type, or if the step fails for a reason other than types. Also empty for the built-in
    step on several data ranks, because the checker rejects backward from a loss over a rank's own rows.
    """
    if CHECKER not in sys.modules or (task.rank_step is None and task.num_data_ranks > 1):
        return ""
    spmd: Any = importlib.import_module(CHECKER)
    try:
        (is_typed,) = FakeRanks(task.num_ranks).run(_typed_step, task, spmd).values
    except RanksFailed as error:
        cause = error.__cause__
        if not isinstance(cause, spmd.SpmdTypeError):
            return ""
        words = shorten_to_line(str(cause).partition("\n")[0])
        checker = f"{Path(str(spmd.__file__)).parent}{os.sep}"
        place = deepest_line(traceback.extract_tb(cause.__traceback__), checker) or "your step"
        return REFUSES.format(place=place, words=words)
    return ACCEPTS if is_typed else ""


def _typed_step(task: Task, spmd: Any) -> bool:
    """Train on the first batch under the type checker. Returns False if no parameter has a type."""
    from spmd_types.checker import typecheck

    task, mesh = task_and_mesh(task)
    names, module = rank_module(task, mesh)
    typed = [parameter for parameter in module.parameters() if spmd.get_local_type(parameter)]
    if not typed:
        return False
    for parameter in typed:
        _add_gradient_types(parameter, spmd)
    batch = rank_batch(task, convert_batch(task.batches[0], task.dtype), mesh)
    if task.shard is None:
        types = _types_of_rows(task, mesh, typed, spmd)
        batch = map_tensors(batch, lambda tensor: spmd.assert_type(tensor.clone(), types))  # a type stays on its tensor
    take_step = task.rank_step or default_step(task)
    with spmd.set_current_mesh(mesh), typecheck("strict" if task.shard is None else "permissive", local=True):
        take_step(module, batch, build_optimizer(task, names, module), task.loss)
    return True


def _add_gradient_types(parameter: Any, spmd: Any) -> None:
    """Add types to gradients. The checker leaves them untyped, so it would not check the update."""
    types = {axis: each.backward_type() for axis, each in spmd.get_local_type(parameter).items()}

    def give(parameter: torch.Tensor) -> None:
        spmd.assert_type(parameter.grad, types)

    parameter.register_post_accumulate_grad_hook(give)


def _types_of_rows(task: Task, mesh: DeviceMesh, typed: list[nn.Parameter], spmd: Any) -> dict[Any, Any]:
    """Batch types: rows vary along data axes. Axes unknown to the parameters are left out."""
    known = {axis for parameter in typed for axis in spmd.get_local_type(parameter)}
    axes = {name: spmd.normalize_axis(mesh.get_group(name)) for name in task.axis_names}
    return {axis: spmd.V if name in task.data_axes else spmd.R for name, axis in axes.items() if axis in known}
