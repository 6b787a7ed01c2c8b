"""A perceptron over tokens under tensor parallelism on plain tensors, as Megatron has it: a row of a table for each layout.

Each rank holds plain parts of the weights, and moves activations by collectives that it differentiates itself; `cuts` says
how the parts lie in the whole weights. Run it with ``equivcheck matrix examples/plain_tensor_parallel.py``. Three layouts are
wrong on purpose:

- Megatron-LM issue #1446: under sequence parallelism, the gradient of a norm is that of a rank's own positions.
- text-generation-inference issue #1036: the bias of a linear that is cut by rows is added before the sum, on every rank.
- torchtitan pull request #4332 mended a bias that each rank adds a share of, so that its gradient was divided, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

VOCABULARY, WIDTH, HIDDEN, SEQUENCE, ROWS, STEPS = 12, 6, 8, 4, 4, 2

CUTS = {
    "embedding.weight": ((0, "tp"),),
    "up.*": ((0, "tp"),),
    "down.weight": ((1, "tp"),),
    "head.weight": ((0, "tp"),),
}


class Model(nn.Module):
    """Tokens of shape (rows, sequence) to logits, by one residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.last_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (rows, sequence, vocabulary), or of some of the vocabulary."""
        x = self.embedding(tokens)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.head(self.last_norm(x))


class Copy(torch.autograd.Function):
    """What all ranks have enters what each computes in part; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """As it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum over ranks."""
        return summed(gradient, ctx.group), None


class Reduce(torch.autograd.Function):
    """Addends become their sum, which all ranks have; the gradient of an addend is that of the sum."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The sum over ranks."""
        return summed(x, group)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As it is."""
        return gradient, None


class Gather(torch.autograd.Function):
    """Parts of the sequence (dim 1) from all ranks; the gradient of a part is the sum of what all have of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The whole sequence."""
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """This rank's part of the sum."""
        return part_of_sum(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """Addends become a part of the sequence of their sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """This rank's part of the sum."""
        ctx.group = group
        return part_of_sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The whole sequence."""
        return gathered(gradient, ctx.group), None


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Parts along dim 1, one after the other."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def part_of_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part along dim 1 of the sum over ranks."""
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=1)]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts, group=group)
    return total


class Part(nn.Module):
    """What a rank has of a layer: its parameters by their names, some of them in part."""

    def __init__(self, whole: nn.Module, cut: dict[str, int], group: dist.ProcessGroup, move: Callable[..., Any]) -> None:
        super().__init__()
        self.group, self.move = group, lambda x: move(x, group)
        for name, parameter in whole.named_parameters():
            own = parameter.detach()
            own = own.chunk(group.size(), dim=cut[name])[group.rank()] if name in cut else own
            self.register_parameter(name, nn.Parameter(own.clone()))


class Vocabulary(Part):
    """Rows of some tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Zeros for the tokens of others, added up."""
        own = tokens - self.group.rank() * len(self.weight)
        mine = (own >= 0) & (own < len(self.weight))
        return self.move(functional.embedding(own * mine, self.weight) * mine[..., None])


class Columns(Part):
    """Some outputs of a linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of all inputs."""
        return functional.linear(self.move(x), self.weight, getattr(self, "bias", None))


class Rows(Part):
    """A linear of some inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, and the bias once."""
        return self.move(functional.linear(x, self.weight)) + self.bias


class BiasOnEveryRank(Rows):
    """The second bug."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what has a bias each."""
        return self.move(functional.linear(x, self.weight, self.bias))


class BiasInShares(Rows):
    """The third bug."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The right sum; the bias has a share of its gradient."""
        return self.move(functional.linear(x, self.weight, self.bias / self.group.size()))


def cut(model: Model, mesh: DeviceMesh, *, sequence: bool = False, rows: type[Rows] = Rows, adds_up: bool = True) -> Model:
    """Give a rank its parts; with `sequence`, norms compute on a part of the positions."""
    group = mesh.get_group("tp")
    enter, leave = (Gather.apply, Scatter.apply) if sequence else (Copy.apply, Reduce.apply)
    model.embedding = Vocabulary(model.embedding, {"weight": 0}, group, leave)
    model.up = Columns(model.up, {"weight": 0, "bias": 0}, group, enter)
    model.down = rows(model.down, {"weight": 1}, group, leave)
    model.head = Columns(model.head, {"weight": 0}, group, enter)
    if sequence and adds_up:
        for parameter in (*model.norm.parameters(), *model.last_norm.parameters(), model.down.bias):
            parameter.register_hook(lambda gradient: summed(gradient, group))
    return model


def cut_in_ddp(model: Model, mesh: DeviceMesh) -> nn.Module:
    """Gradients averaged over data ranks."""
    return DistributedDataParallel(cut(model, mesh, sequence=True), process_group=mesh.get_group("dp"))


def cut_in_fsdp2(model: Model, mesh: DeviceMesh) -> None:
    """Parts divided over data ranks."""
    for layer in (cut(model, mesh).embedding, model.up, model.down, model):
        fully_shard(layer, mesh=mesh["dp"])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Over positions, of the whole vocabulary."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_parts(logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same of logits of some of the vocabulary."""
    highest = logits.detach().amax(dim=-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = Reduce.apply((logits - highest[..., None]).exp().sum(dim=-1), group)
    own = targets - group.rank() * logits.shape[-1]
    mine = (own >= 0) & (own < logits.shape[-1])
    of_target = Reduce.apply(logits.gather(-1, (own * mine)[..., None]).squeeze(-1) * mine, group)
    return (total.log() + highest - of_target).mean()


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
    """Of a rank: the loss in parts of the vocabulary."""
    optimizer.zero_grad()
    tokens, targets = batch
    group = next(module for module in model.modules() if isinstance(module, Part)).group
    loss = in_parts(model(tokens), targets, group)
    loss.backward()
    optimizer.step()
    return loss


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, and the tokens that follow."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator) for _ in range(STEPS)]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


TP = {"cuts": CUTS, "rank_step": step}
WRONG = {"mesh": {"tp": 2}, **TP, "expected": "diverged"}

matrix = equivcheck.Matrix(
    model=Model,
    batches=batches(),
    loss=cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    layouts={
        "TP": {"mesh": {"tp": 2}, "parallelize": cut, **TP},
        "TP, sequence parallel": {"mesh": {"tp": 4}, "parallelize": partial(cut, sequence=True), **TP},
        "DDP x TP, sequence parallel": {"mesh": {"dp": 2, "tp": 2}, "parallelize": cut_in_ddp, **TP},
        "FSDP2 x TP": {"mesh": {"dp": 2, "tp": 2}, "parallelize": cut_in_fsdp2, **TP},
        "norms of own positions (Megatron-LM #1446)": {"parallelize": partial(cut, sequence=True, adds_up=False), **WRONG},
        "bias on every rank (TGI #1036)": {"parallelize": partial(cut, rows=BiasOnEveryRank), **WRONG},
        "bias in shares (torchtitan #4332)": {"parallelize": partial(cut, rows=BiasInShares), **WRONG},
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
