"""Two judges of a program: the type checker of spmd_types, and the comparison of runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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
    """Judgements by the type checker and by runs."""

    types: str
    """First sentence of the type error; empty if there is none."""
    needs_gradients: bool
    """Whether the error appears only if gradients have types."""
    outcome: str
    """Outcome of the comparison of runs."""
    first: str = ""
    """First difference between ranks and one device: step, phase and tensor."""
    cause: str = ""
    """Cause in the verdict; empty if none is known."""

    @property
    def is_seen(self) -> bool:
        """Whether runs differ."""
        return bool(self.first)

    @property
    def is_refused_before(self) -> bool:
        """Whether the type error appears without types for gradients."""
        return bool(self.types) and not self.needs_gradients


def refused(program: Program, change: Change | None) -> tuple[str, bool]:
    """First sentence of the type error in a complete step, and whether it needs types for gradients.

    One rank runs alone. Parameters and inputs have types, and gradients get them as soon as they exist, so that the update is
    checked too.
    """
    gradients: list[torch.Tensor] = []
    try:
        FakeRanks(math.prod(program.mesh.values())).run(_typed_step, program, program.changed(change), gradients.append)
    except RanksFailed as error:
        words = error.failure.summary
        if not words.startswith(REFUSES):
            raise
        return first_sentence(words.removeprefix(REFUSES)), bool(gradients)
    return "", False


def _typed_step(program: Program, step: Step, note: Callable[[torch.Tensor], None]) -> None:
    mesh = init_device_mesh("cpu", tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    model = program.cut(program.model(), mesh)
    groups: tuple[Any, ...] = model.groups
    for name, parameter in model.named_parameters():
        types = program.replicated | dict.fromkeys((axis for _, axis in program.lie(name)), spmd.V)
        _give_types(parameter, dict(zip(groups, (types[axis] for axis in program.mesh), strict=True)), note)
    batch = tuple(each.clone() for each in program.batches[0])  # types stay on tensors
    for each in batch:
        of_axes = (spmd.V if axis in program.data_axes else spmd.R for axis in program.mesh)
        spmd.assert_type(each, dict(zip(groups, of_axes, strict=True)))
    with spmd.set_current_mesh(mesh), typecheck("strict", local=True):
        step(model, batch, sgd(list(model.parameters())), *groups)


def _give_types(parameter: nn.Parameter, types: dict[Any, Any], note: Callable[[torch.Tensor], None]) -> None:
    """Give types to a parameter, and the resulting types to its gradient."""

    def give_gradient(parameter: torch.Tensor) -> None:
        note(parameter.grad)
        spmd.assert_type(parameter.grad, {group: each.backward_type() for group, each in types.items()})

    spmd.assert_type(parameter, types)
    parameter.register_post_accumulate_grad_hook(give_gradient)


def first_sentence(words: str) -> str:
    """First sentence of an error, without the axis, because its name depends on earlier runs."""
    sentence = re.split(r"\n|\. | \(|; ", words, maxsplit=1)[0]
    return re.sub(r"PerMeshAxisLocalSpmdType\.| on axis \S+?(?=[:,]?(?: |$))", "", sentence)


def compared(program: Program, change: Change | None, *, explain: bool) -> UserVerdict:
    """Compare runs, and explain a difference."""
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


def judged(program: Program, change: Change | None, *, explain: bool) -> Judged:
    """Ask both judges."""
    types, needs_gradients = refused(program, change)
    verdict = compared(program, change, explain=explain)
    first = verdict.divergence
    return Judged(
        types=types,
        needs_gradients=needs_gradients,
        outcome=verdict.outcome.name,
        first=f"step {first.step} {first.phase.value} {first.tensor}" if first else "",
        cause=verdict.cause,
    )


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without state."""
    return torch.optim.SGD(parameters, lr=0.1)
