"""Two judges of a program: the type checker of spmd_types, and the comparison of runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.checker import typecheck
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from equivcheck import check_training
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.fake.ranks import FakeRanks
from typed.program import Change, Program, Step

REFUSES = f"{spmd.SpmdTypeError.__name__}: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What both say."""

    types: str
    """The first sentence of the type checker's error, empty where it accepts."""
    outcome: str
    """Of the comparison of runs."""
    first: str = ""
    """Where ranks differ first: step, phase and tensor."""
    cause: str = ""
    """What the verdict names as the cause; empty where nothing known fits."""


def refused(program: Program, change: Change | None) -> str:
    """What the type checker says of a whole step, in the first sentence of its error; empty where it accepts.

    One rank runs without others. All is typed that can be: parameters and inputs, and gradients when they are there, so that the
    update is checked as well.
    """
    try:
        FakeRanks(torch.Size(program.mesh.values()).numel()).run(_typed_step, program, program.changed(change))
    except RanksFailed as error:
        words = error.failure.summary
        if not words.startswith(REFUSES):
            raise
        return first_sentence(words.removeprefix(REFUSES))
    return ""


def _typed_step(program: Program, step: Step) -> None:
    mesh = init_device_mesh("cpu", tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    model = program.cut(program.model(), mesh)
    groups: tuple[Any, ...] = model.groups
    for name, parameter in model.named_parameters():
        types = program.replicated | dict.fromkeys((axis for _, axis in program.lie(name)), spmd.V)
        typed(parameter, groups, tuple(types[axis] for axis in program.mesh))
    batch = tuple(each.clone() for each in program.batches[0])  # types stay on tensors
    for each in batch:
        typed(each, groups, tuple(spmd.V if axis in program.data_axes else spmd.R for axis in program.mesh))
    with spmd.set_current_mesh(mesh), typecheck("strict", local=True):
        step(model, batch, sgd(list(model.parameters())), *groups)


def typed(tensor: torch.Tensor, groups: tuple[Any, ...], types: tuple[Any, ...]) -> None:
    """Give a tensor its types, and its gradient those that follow from them."""
    spmd.assert_type(tensor, dict(zip(groups, types, strict=True)))
    if tensor.requires_grad:
        of_gradient = tuple(each.backward_type() for each in types)
        tensor.register_post_accumulate_grad_hook(lambda parameter: typed(parameter.grad, groups, of_gradient))


def first_sentence(words: str) -> str:
    """Of an error: without how to mend it, and without the axis, whose name depends on what else has run."""
    sentence = re.split(r"\n|\. | \(|; ", words, maxsplit=1)[0]
    return re.sub(r"PerMeshAxisLocalSpmdType\.| on axis [^ ,:]+", "", sentence)


def compared(program: Program, change: Change | None, *, explain: bool) -> UserVerdict:
    """What the comparison of runs says."""
    step = program.changed(change)
    return check_training(
        model=program.model,
        parallelize=program.cut,
        mesh=program.mesh,
        batches=program.batches,
        loss=program.loss,
        optimizer=sgd,
        step=program.alone,
        rank_step=lambda model, batch, optimizer, _loss: step(model, batch, optimizer, *model.groups),
        data_axes=program.data_axes,
        cuts=dict(program.cuts),
        explain=explain,
    )


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Without state."""
    return torch.optim.SGD(parameters, lr=0.1)
