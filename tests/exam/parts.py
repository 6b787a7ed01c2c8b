"""Findings of Megatron-LM #7452 about what is in parts and is taken for the whole, or the other way round."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from exam.collectives import Copy, Gather, Scatter, Sum, own, total
from exam.item import Trained
from exam.trainings import WIDTH, as_it_is, numbers, reducing, usual, world

ROWS, SEQUENCE, MAX_NORM = 4, 4, 0.05


# 2: cross-entropy of parts of the vocabulary, given the whole


def classes() -> list[Any]:
    """Rows, and a class for each."""
    return [(rows, torch.arange(ROWS) % WIDTH) for (rows,) in numbers((ROWS, WIDTH))]


def cross_entropy_of_parts(*, cut: bool) -> Any:
    """Each rank has the logits of some classes."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        (inputs, targets), group = batch, world()
        optimizer.zero_grad()
        logits = model(inputs)
        part = Scatter.apply(logits, -1, group) if cut else logits
        numbers_here = torch.arange(part.shape[-1]) + group.rank() * part.shape[-1]
        mine = (targets[:, None] == numbers_here).to(part.dtype)
        chosen = Sum.apply((part * mine).sum(-1), group)
        value = (Sum.apply(part.exp().sum(-1), group).log() - chosen).mean()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def whole_logits() -> Trained:
    """Where all ranks have all logits, all but those of the first rank are counted once more."""
    brought = usual(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        mesh={"tp": 2},
        parallelize=as_it_is,
        batches=classes(),
        loss=functional.cross_entropy,
        rank_step=cross_entropy_of_parts(cut=True),
    )
    return Trained(brought, {"rank_step": cross_entropy_of_parts(cut=False)})


# 8: a gradient that is each rank's own, taken for one that all have


class Sinks(nn.Module):
    """Heads, each with a number that its weight is compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.sinks = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, heads)."""
        weights, sinks = local(self.heads.weight), local(self.sinks)
        part = x @ weights.T
        part = part * torch.sigmoid(part - sinks)
        return Gather.apply(part, -1, world(), False) if isinstance(self.sinks, DTensor) else part


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def heads_of_ranks(model: Sinks, mesh: DeviceMesh) -> None:
    """Some heads, with their numbers."""
    model.heads.weight = nn.Parameter(distribute_tensor(model.heads.weight.detach(), mesh, [Shard(0)]))
    model.sinks = nn.Parameter(distribute_tensor(model.sinks.detach(), mesh, [Shard(0)]))


def clip(model: nn.Module) -> None:
    """On one device."""
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def clip_over_ranks(*, sinks_of_all: bool) -> Any:
    """By the norm of all, or of all but the numbers of other ranks than the first."""

    def reduce(model: nn.Module) -> None:
        assert isinstance(model, Sinks)
        squares = local(model.heads.weight.grad).square().sum()
        if sinks_of_all or world().rank() == 0:
            squares = squares + local(model.sinks.grad).square().sum()
        norm = total(squares, world()).sqrt()
        for parameter in model.parameters():
            local(parameter.grad).mul_(min(1.0, MAX_NORM / (float(norm) + 1e-6)))

    return reducing(reduce)


def sinks_not_in_norm() -> Trained:
    """Two ranks with two heads each."""
    brought = usual(
        model=Sinks,
        mesh={"tp": 2},
        parallelize=heads_of_ranks,
        step=reducing(clip),
        rank_step=clip_over_ranks(sinks_of_all=True),
    )
    return Trained(brought, {"rank_step": clip_over_ranks(sinks_of_all=False)})


# 11 and appendix B: weights that all ranks have, of which each sees a part of what flows back


class NormOfHeads(nn.Module):
    """A norm whose weight all heads share."""

    group: dist.ProcessGroup | None = None
    sums = True

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.weight = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width)."""
        x, weight = self.heads(x), self.weight
        if self.group is not None:
            x, weight = Scatter.apply(x, -1, self.group), Copy.apply(weight, self.group) if self.sums else weight
        x = (functional.rms_norm(x.unflatten(-1, (-1, 2)), (2,)) * weight).flatten(-2)
        return x if self.group is None else Gather.apply(x, -1, self.group, False)


class Decoder(nn.Module):
    """A layer that computes on a part of the sequence; its weight's gradient is added up over the parts."""

    group: dist.ProcessGroup | None = None
    sums = False

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width)."""
        if self.group is None:
            return self.decoder(x)
        part = functional.linear(own(x, 1, self.group), Copy.apply(self.decoder.weight, self.group))
        return Gather.apply(part, 1, self.group, self.sums)


def in_group(*, sums: bool) -> Any:
    """Tensor parallelism, with gradients summed or not."""

    def parallelize(model: NormOfHeads | Decoder, mesh: DeviceMesh) -> None:
        model.group, model.sums = mesh.get_group(), sums

    return parallelize


def norm_unsummed() -> Trained:
    """Each rank has one head."""
    brought = usual(model=NormOfHeads, mesh={"tp": 2}, parallelize=in_group(sums=True))
    return Trained(brought, {"parallelize": in_group(sums=False)})


def copies_summed() -> Trained:
    """Each rank has the whole loss, so that what flows back is the same for all."""
    brought = usual(
        model=Decoder,
        mesh={"tp": 2},
        parallelize=in_group(sums=False),
        batches=numbers((ROWS, SEQUENCE, WIDTH), (ROWS, SEQUENCE, WIDTH)),
    )
    return Trained(brought, {"parallelize": in_group(sums=True)})


# 12: a checkpoint's names, and those of a stage


class Stage(nn.Module):
    """The layers of one rank, restored from what one device had saved."""

    def __init__(self, model: nn.ModuleDict, mesh: DeviceMesh, *, counts_from_zero: bool) -> None:
        super().__init__()
        saved = {name: layer.weight.detach().clone() for name, layer in model.items()}
        self.number, size = mesh.get_local_rank(), len(model) // mesh.size()
        self.layers = nn.ModuleDict({name: model[name] for name in list(model)[self.number * size : (self.number + 1) * size]})
        for here, (name, layer) in enumerate(self.layers.items()):
            layer.weight.data.copy_(saved[str(here) if counts_from_zero else name])
        own_layers = nn.Sequential(*self.layers.values())
        stage = PipelineStage(own_layers, self.number, mesh.size(), torch.device("cpu"), group=mesh.get_group())
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=functional.mse_loss)


class Stack(nn.ModuleDict):
    """Layers by number."""

    def __init__(self) -> None:
        super().__init__({str(number): nn.Linear(WIDTH, WIDTH, bias=False) for number in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.values():
            x = layer(x)
        return x


def step_of_stage(stage: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor | None:
    """By the schedule."""
    inputs, targets = batch
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    stage.schedule.step(*(() if stage.number else (inputs,)), **({"target": targets, "losses": losses} if stage.number else {}))
    optimizer.step()
    return torch.stack(losses).mean() if losses else None


def restored(*, counts_from_zero: bool) -> Any:
    """Two stages."""
    return lambda model, mesh: Stage(model, mesh, counts_from_zero=counts_from_zero)


def layers_of_first_stage() -> Trained:
    """The second stage begins with the third layer, and finds the first in the checkpoint."""
    brought = usual(model=Stack, mesh={"pp": 2}, parallelize=restored(counts_from_zero=False), rank_step=step_of_stage)
    return Trained(brought, {"parallelize": restored(counts_from_zero=True)})
