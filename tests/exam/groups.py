"""Findings of Megatron-LM #7452 about layers that were given a process group, and use another in one place.

There are two ways in which four ranks can be two pairs. The layers are given one, `groups.tp`; what stands for the groups that a
program makes by default is the other, `groups.default`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from exam.collectives import Copy, Gather, Scatter, Sum, joined, own
from exam.item import Trained
from exam.trainings import WIDTH, numbers, reduced, reducing, usual

ROWS, SEQUENCE = 4, 2


@dataclass(kw_only=True)
class Groups:
    """What a layer communicates with."""

    tp: dist.ProcessGroup
    """What it was given."""
    default: dist.ProcessGroup
    """What it would have used otherwise."""
    dp: dist.ProcessGroup
    """Ranks that have other rows."""


class Layer(nn.Module):
    """A layer before and one after what is spread."""

    groups: Groups | None = None
    wrong = False

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def chosen(self) -> dist.ProcessGroup:
        """For the one place."""
        assert self.groups is not None
        return self.groups.default if self.wrong else self.groups.tp


class Recomputed(torch.autograd.Function):
    """A layer whose input is kept in parts, one a rank, and put together again for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module, parts: dist.ProcessGroup, group: dist.ProcessGroup) -> torch.Tensor:
        """Keep a part."""
        ctx.layer, ctx.group, ctx.part = layer, group, own(x.detach(), -1, parts).clone()
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Compute again, and go back through that."""
        x = joined(ctx.part, -1, ctx.group).requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None, None, None


class Checkpointed(Layer):
    """Activation checkpointing of the second layer, the input of which tensor-parallel ranks share out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width)."""
        x = torch.tanh(self.before(x))
        return self.after(x) if self.groups is None else Recomputed.apply(x, self.after, self.groups.tp, self.chosen())


class Masked(Layer):
    """Sequences in parts, and the mask of what is padding in parts as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width); what is padding begins with a negative number."""
        mask = (x[..., :1] > 0).to(x.dtype)
        x = self.before(x)
        if self.groups is None:
            return self.after(x * mask)
        part = Scatter.apply(x, 1, self.groups.tp) * own(mask, 1, self.chosen())
        return self.after(Gather.apply(part, 1, self.groups.tp, False))


class Crossed(Layer):
    """Columns, then rows, on copies of the input that add gradients up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width)."""
        x = torch.tanh(self.before(x))
        if self.groups is None:
            return self.after(x)
        x = Copy.apply(x, self.chosen())
        return Sum.apply(own(x, -1, self.groups.tp) @ own(self.after.weight, 1, self.groups.tp).T, self.groups.tp)


class Embedded(Layer):
    """Sequences cut into parts, and put together again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width)."""
        x = torch.tanh(self.before(x))
        if self.groups is None:
            return self.after(x)
        return self.after(Gather.apply(Scatter.apply(x, 1, self.chosen()), 1, self.groups.tp, False))


class Replacing(Layer):
    """A forward that leaves other groups behind than it found."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width)."""
        x = torch.tanh(self.before(x))
        if self.groups is None:
            return self.after(x)
        x = self.after(Gather.apply(Scatter.apply(x, 1, self.groups.tp), 1, self.groups.tp, False))
        if self.wrong:
            self.groups.tp = self.groups.default
        return x


def spread(*, wrong: bool) -> Callable[[Layer, DeviceMesh], None]:
    """The layer, given groups."""

    def parallelize(model: Layer, mesh: DeviceMesh) -> None:
        model.groups = Groups(tp=mesh.get_group("tp"), default=mesh.get_group("dp"), dp=mesh.get_group("dp"))
        model.wrong = wrong

    return parallelize


def reduce(model: nn.Module) -> None:
    """Over ranks that have other rows; each column or row is some tensor-parallel rank's."""
    assert isinstance(model, Layer)
    assert model.groups is not None
    if isinstance(model, Crossed):
        reduced([model.after.weight], model.groups.tp, average=False)
    reduced(model.parameters(), model.groups.dp, average=True)


def trained(layer: type[Layer]) -> Callable[[], Trained]:
    """A layer, right and wrong."""

    def program() -> Trained:
        brought = usual(
            model=layer,
            mesh={"tp": 2, "dp": 2},
            batches=numbers((ROWS, SEQUENCE, WIDTH), (ROWS, SEQUENCE, WIDTH)),
            loss=functional.mse_loss,
            parallelize=spread(wrong=False),
            rank_step=reducing(reduce),
        )
        return Trained(brought, {"parallelize": spread(wrong=True)})

    return program
