"""A perceptron over tokens with tensor parallelism on plain tensors, as in Megatron: one table row for each layout.

Each rank holds plain shards of the weights. Autograd functions with collectives move the activations. `cuts` names the dim along
which each weight is sharded. Run it with ``equivcheck matrix examples/plain_tensor_parallel.py``. Three layouts are wrong on
purpose:

- Megatron-LM issue #1446: under sequence parallelism, a norm's gradient covers only the rank's own positions.
- text-generation-inference issue #1036: every rank adds the bias of a row-parallel linear before the sum over ranks.
- torchtitan pull request #4332 fixed a bias that each rank divided before adding it, which divided its gradient, too.
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
    """Map tokens (rows, sequence) to logits through one residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.last_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (rows, sequence, vocabulary). Under tensor parallelism each rank has a part of the vocabulary."""
        x = self.embedding(tokens)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.head(self.last_norm(x))


class Copy(torch.autograd.Function):
    """Enter a tensor-parallel region: identity whose backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.group), None


class Reduce(torch.autograd.Function):
    """Leave a tensor-parallel region: sum over ranks. Backward is the identity."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """Gather the sequence (dim 1) from all ranks. Backward sums the gradients over ranks and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return part_of_sum(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """Sum over ranks and keep this rank's part of the sequence. Backward gathers the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return part_of_sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group), None


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate all ranks' parts along dim 1."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def part_of_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks and keep this rank's part along dim 1."""
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=1)]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts, group=group)
    return total


class Part(nn.Module):
    """A layer with this rank's shards. `cut` maps parameter names to sharded dims; other parameters are replicated."""

    def __init__(self, whole: nn.Module, cut: dict[str, int], group: dist.ProcessGroup, move: Callable[..., Any]) -> None:
        super().__init__()
        self.group, self.move = group, lambda x: move(x, group)
        for name, parameter in whole.named_parameters():
            own = parameter.detach()
            own = own.chunk(group.size(), dim=cut[name])[group.rank()] if name in cut else own
            self.register_parameter(name, nn.Parameter(own.clone()))


class Vocabulary(Part):
    """Embedding sharded along the vocabulary."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up this rank's tokens. Tokens on other ranks give zeros, which the sum over ranks fills in."""
        own = tokens - self.group.rank() * len(self.weight)
        mine = (own >= 0) & (own < len(self.weight))
        return self.move(functional.embedding(own * mine, self.weight) * mine[..., None])


class Columns(Part):
    """Column-parallel linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.move(x), self.weight, getattr(self, "bias", None))


class Rows(Part):
    """Row-parallel linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, then add the bias once."""
        return self.move(functional.linear(x, self.weight)) + self.bias


class BiasOnEveryRank(Rows):
    """Second bug: every rank adds the bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(functional.linear(x, self.weight, self.bias))


class BiasInShares(Rows):
    """Third bug: every rank adds its share of the bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the right outputs, but a bias gradient divided by the number of ranks."""
        return self.move(functional.linear(x, self.weight, self.bias / self.group.size()))


def cut(model: Model, mesh: DeviceMesh, *, sequence: bool = False, rows: type[Rows] = Rows, adds_up: bool = True) -> Model:
    """Give a rank its shards. With `sequence`, norms run on this rank's positions only."""
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
    """Average gradients over the data-parallel ranks."""
    return DistributedDataParallel(cut(model, mesh, sequence=True), process_group=mesh.get_group("dp"))


def cut_in_fsdp2(model: Model, mesh: DeviceMesh) -> None:
    """Shard each tensor-parallel shard over the data-parallel ranks, too."""
    for layer in (cut(model, mesh).embedding, model.up, model.down, model):
        fully_shard(layer, mesh=mesh["dp"])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss over positions, for logits with the whole vocabulary."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_parts(logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Mean loss over positions, for logits that are sharded along the vocabulary."""
    highest = logits.detach().amax(dim=-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = Reduce.apply((logits - highest[..., None]).exp().sum(dim=-1), group)
    own = targets - group.rank() * logits.shape[-1]
    mine = (own >= 0) & (own < logits.shape[-1])
    of_target = Reduce.apply(logits.gather(-1, (own * mine)[..., None]).squeeze(-1) * mine, group)
    return (total.log() + highest - of_target).mean()


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
    """Train one step on a rank, with a loss for sharded logits."""
    optimizer.zero_grad()
    tokens, targets = batch
    group = next(module for module in model.modules() if isinstance(module, Part)).group
    loss = in_parts(model(tokens), targets, group)
    loss.backward()
    optimizer.step()
    return loss


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and next tokens for each step."""
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
