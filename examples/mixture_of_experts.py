"""A mixture of experts under data and expert parallelism (tokens sent by all-to-all): a row of a table for each layout.

Each token goes to two of four experts, and to the last one none goes, so that a rank may compute on nothing. An
auxiliary loss keeps the load in balance: it asks for the share of tokens that each expert gets of the whole batch, not
of a rank's rows. Run it with ``equivcheck matrix examples/mixture_of_experts.py``. Three layouts are wrong on purpose:

- NeMo Automodel pull request #2995: an expert without tokens is skipped, and has no gradient where it should have
  zeros, so that the optimizer leaves it out, weight decay and momentum included.
- pytorch issue #160285: an expert gets the tokens of all ranks, each of which divides its loss by its own tokens alone;
  nobody divides the expert's gradient by the number of ranks, as averaging does with all others.
- transformers pull request #48205: ranks that see the same rows each compute some experts. The gradient of a routing
  weight is there on the rank of its expert alone, and nobody adds the parts up, so that every rank trains another router.
  torchtitan issue #2387 is of the same kind.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

WIDTH, EXPERTS, CHOSEN, ROWS, STEPS = 4, 4, 2, 8, 2


class Expert(nn.Sequential):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class MixtureOfExperts(nn.Module):
    """Rows to the sum of what their experts make of them, and the auxiliary loss."""

    skips_empty = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.router.weight.data *= 4.0
        self.router.bias.data[-1] = -20.0  # nobody's choice
        self.experts = nn.ModuleDict({str(number): Expert() for number in range(EXPERTS)})
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shape (rows, width), as the outputs."""
        probabilities = self.router(x).softmax(dim=-1)
        weights, chosen = probabilities.topk(CHOSEN)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.computed(x[order // CHOSEN], counts) * self.copied(weights).flatten()[order, None]
        balance = EXPERTS * (self.shares(counts) * probabilities.mean(dim=0)).sum()
        return x + self.joined(torch.zeros_like(x).index_add(0, order // CHOSEN, outputs)), balance

    def copied(self, weights: torch.Tensor) -> torch.Tensor:
        """What each part of the experts multiplies with: there is one."""
        return weights

    def joined(self, outputs: torch.Tensor) -> torch.Tensor:
        """The sum over all parts of the experts: there is one."""
        return outputs

    def shares(self, counts: torch.Tensor) -> torch.Tensor:
        """Of tokens that each expert gets of the whole batch."""
        total = counts.double()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total / total.sum()

    def computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What experts make of rows, which are in the order of experts."""
        parts = zip(self.experts.values(), rows.split(counts.tolist()), strict=True)
        return torch.cat([rows[:0], *(expert(part) for expert, part in parts if len(part) or not self.skips_empty)])


class ExpertParallel(MixtureOfExperts):
    """Each rank has some of the experts: rows are sent to them and back. Gradients are averaged over ranks."""

    divides_experts = True

    @classmethod
    def of(cls, model: MixtureOfExperts, mesh: DeviceMesh) -> ExpertParallel:
        """Turn a whole model into one that has this rank's experts."""
        model.__class__, model.group, model.size = cls, mesh.get_group(), mesh.size()
        for number in range(EXPERTS):
            if number * model.size // EXPERTS != mesh.get_local_rank():
                del model.experts[str(number)]
        for parameter in model.router.parameters():
            parameter.register_post_accumulate_grad_hook(model.average)
        for parameter in model.experts.parameters():
            parameter.register_post_accumulate_grad_hook(model.divide)
        return model

    def average(self, parameter: torch.Tensor) -> None:
        """Over all ranks."""
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= self.size

    def divide(self, parameter: torch.Tensor) -> None:
        """Rows of all ranks are in the gradient: their sum is there already."""
        if self.divides_experts:
            parameter.grad /= self.size

    def computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What experts of all ranks make of this rank's rows."""
        by_source = torch.empty_like(counts)
        dist.all_to_all_single(by_source, counts, group=self.group)
        by_source = by_source.view(self.size, -1)
        sent, received = counts.view(self.size, -1).sum(dim=1).tolist(), by_source.sum(dim=1).tolist()
        arrived = Exchange.apply(rows, sent, received, self.group)
        numbers = torch.arange(by_source.shape[1]).repeat(self.size).repeat_interleave(by_source.flatten())
        order = numbers.argsort(stable=True)
        outputs = super().computed(arrived[order], by_source.sum(dim=0))
        return Exchange.apply(torch.zeros_like(arrived).index_copy(0, order, outputs), received, sent, self.group)


class Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        """So many rows to each rank, so many from each."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Back to where the rows are from."""
        return Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class SameRows(MixtureOfExperts):
    """Each rank has some of the experts, and all rows, as ranks of a tensor-parallel group do: sums go over ranks, no rows."""

    @classmethod
    def of(cls, model: MixtureOfExperts, mesh: DeviceMesh) -> SameRows:
        """Turn a whole model into one that has this rank's experts."""
        model.__class__, model.over = cls, mesh.get_group()
        for number in range(EXPERTS):
            if number * mesh.size() // EXPERTS != mesh.get_local_rank():
                del model.experts[str(number)]
        return model

    def computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What experts that are here make of their rows; zeros for those of others."""
        parts = enumerate(rows.split(counts.tolist()))
        experts = self.experts
        return torch.cat([experts[str(number)](part) if str(number) in experts else part * 0 for number, part in parts])

    def copied(self, weights: torch.Tensor) -> torch.Tensor:
        """On each rank the gradient is that of its experts' rows: the router needs the sum."""
        return Copy.apply(weights, self.over)

    def joined(self, outputs: torch.Tensor) -> torch.Tensor:
        """Over ranks."""
        return Sum.apply(outputs, self.over)


class Copy(torch.autograd.Function):
    """The same forward; backward the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """As it is."""
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Of all ranks."""
        return Sum.apply(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over ranks; backward the same for each."""

    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Of all ranks."""
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As it is."""
        return gradient, None


class SkipsEmpty(ExpertParallel):
    """The first bug."""

    skips_empty = True


class SumsExperts(ExpertParallel):
    """The second bug."""

    divides_experts = False


class RouterUnsummed(SameRows):
    """The third bug."""

    def copied(self, weights: torch.Tensor) -> torch.Tensor:
        """Each rank goes on with its part of the gradient."""
        return weights


def ddp(model: MixtureOfExperts, mesh: DeviceMesh) -> nn.Module:
    """All experts on every rank."""
    model.group = mesh.get_group()
    return DistributedDataParallel(model)


def fsdp2(model: MixtureOfExperts, mesh: DeviceMesh) -> None:
    """Shards of each expert."""
    model.group = mesh.get_group()
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)


def loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Of the task, and a little of the auxiliary one."""
    rows, balance = outputs
    return functional.mse_loss(rows, targets) + 0.1 * balance


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)) for _ in range(STEPS)]


matrix = equivcheck.Matrix(
    model=MixtureOfExperts,
    batches=batches(),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    layouts={
        "DDP": {"mesh": {"dp": 2}, "parallelize": ddp},
        "FSDP2": {"mesh": {"dp": 2}, "parallelize": fsdp2},
        "EP": {"mesh": {"dp": 2}, "parallelize": ExpertParallel.of},
        "EP, one expert a rank": {"mesh": {"dp": 4}, "parallelize": ExpertParallel.of},
        "EP over same rows": {"mesh": {"ep": 2}, "parallelize": SameRows.of},
        "empty expert skipped (Automodel #2995)": {
            "mesh": {"dp": 2},
            "parallelize": SkipsEmpty.of,
            "expected": "diverged",
        },
        "expert gradients summed (pytorch #160285)": {
            "mesh": {"dp": 2},
            "parallelize": SumsExperts.of,
            "expected": "diverged",
        },
        "router gradient in parts (transformers #48205)": {
            "mesh": {"ep": 2},
            "parallelize": RouterUnsummed.of,
            "expected": "diverged",
        },
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
