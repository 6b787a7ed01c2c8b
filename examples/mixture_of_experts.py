"""A mixture of experts under data and expert parallelism with all-to-all: one table row for each layout.

The router sends each token to two out of four experts, but none to the last one, so a rank can have no tokens to compute on. An
auxiliary loss balances the load. It needs each expert's share of the tokens in the whole batch, not in one rank's rows. Run it
with ``equivcheck matrix examples/mixture_of_experts.py``. Three layouts are wrong on purpose:

- NeMo Automodel pull request #2995: an expert without tokens is skipped, so its gradient is None instead of zero. The optimizer
  then skips its weight decay and momentum, too.
- pytorch issue #160285: an expert gets tokens from all ranks, but each rank divides its loss by its own tokens only. All other
  gradients are averaged over ranks, but nothing divides the expert's gradient by the number of ranks.
- transformers pull request #48205: all ranks see the same rows, and each computes some experts. A routing weight has a gradient
  only on its expert's rank. Nothing sums these gradients, so each rank trains a different router. torchtitan issue #2387 is
  similar.
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
    """Two linears with a tanh between them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class MixtureOfExperts(nn.Module):
    """Sum the weighted outputs of each row's experts, and compute the auxiliary loss."""

    skips_empty = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.router.weight.data *= 4.0
        self.router.bias.data[-1] = -20.0  # no token chooses the last expert
        self.experts = nn.ModuleDict({str(number): Expert() for number in range(EXPERTS)})
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (rows, width) to outputs with the same shape and the auxiliary loss."""
        probabilities = self.router(x).softmax(dim=-1)
        weights, chosen = probabilities.topk(CHOSEN)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.computed(x[order // CHOSEN], counts) * self.copied(weights).flatten()[order, None]
        balance = EXPERTS * (self.shares(counts) * probabilities.mean(dim=0)).sum()
        return x + self.joined(torch.zeros_like(x).index_add(0, order // CHOSEN, outputs)), balance

    def copied(self, weights: torch.Tensor) -> torch.Tensor:
        """Copy the routing weights to all ranks that compute experts. Here there is only one."""
        return weights

    def joined(self, outputs: torch.Tensor) -> torch.Tensor:
        """Sum the outputs over all ranks that compute experts. Here there is only one."""
        return outputs

    def shares(self, counts: torch.Tensor) -> torch.Tensor:
        """Each expert's share of the tokens in the whole batch."""
        total = counts.double()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total / total.sum()

    def computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run the experts on rows that are sorted by expert."""
        parts = zip(self.experts.values(), rows.split(counts.tolist()), strict=True)
        return torch.cat([rows[:0], *(expert(part) for expert, part in parts if len(part) or not self.skips_empty)])


class ExpertParallel(MixtureOfExperts):
    """Give each rank some experts and send them their rows by all-to-all. Gradients are averaged over ranks."""

    divides_experts = True

    @classmethod
    def of(cls, model: MixtureOfExperts, mesh: DeviceMesh) -> ExpertParallel:
        """Turn a full model into one with this rank's experts."""
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
        """Average the gradient over all ranks."""
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= self.size

    def divide(self, parameter: torch.Tensor) -> None:
        """Divide an expert's gradient. It already sums over the rows from all ranks."""
        if self.divides_experts:
            parameter.grad /= self.size

    def computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send this rank's rows to their experts on all ranks, and return the outputs."""
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
    """All-to-all for rows. Backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        """Send `sent` rows to each rank and receive `received` rows from each."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Send each row's gradient back to the rank that the row came from."""
        return Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class SameRows(MixtureOfExperts):
    """Give each rank some experts and all rows, as in tensor parallelism. Outputs are summed over ranks, and no rows move."""

    @classmethod
    def of(cls, model: MixtureOfExperts, mesh: DeviceMesh) -> SameRows:
        """Turn a full model into one with this rank's experts."""
        model.__class__, model.over = cls, mesh.get_group()
        for number in range(EXPERTS):
            if number * mesh.size() // EXPERTS != mesh.get_local_rank():
                del model.experts[str(number)]
        return model

    def computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts. Rows for other experts get zeros."""
        parts = enumerate(rows.split(counts.tolist()))
        experts = self.experts
        return torch.cat([experts[str(number)](part) if str(number) in experts else part * 0 for number, part in parts])

    def copied(self, weights: torch.Tensor) -> torch.Tensor:
        """Sum the routing weights' gradient over ranks, because each rank only has the gradient for its own experts."""
        return Copy.apply(weights, self.over)

    def joined(self, outputs: torch.Tensor) -> torch.Tensor:
        """Sum the outputs over ranks."""
        return Sum.apply(outputs, self.over)


class Copy(torch.autograd.Function):
    """Identity whose backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Sum.apply(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """Sum over ranks. Backward is the identity."""

    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class SkipsEmpty(ExpertParallel):
    """First bug: experts without tokens are skipped."""

    skips_empty = True


class SumsExperts(ExpertParallel):
    """Second bug: expert gradients are not divided by the number of ranks."""

    divides_experts = False


class RouterUnsummed(SameRows):
    """Third bug: router gradients are not summed over ranks."""

    def copied(self, weights: torch.Tensor) -> torch.Tensor:
        return weights


def ddp(model: MixtureOfExperts, mesh: DeviceMesh) -> nn.Module:
    """Replicate all experts and average gradients."""
    model.group = mesh.get_group()
    return DistributedDataParallel(model)


def fsdp2(model: MixtureOfExperts, mesh: DeviceMesh) -> None:
    """Shard each expert."""
    model.group = mesh.get_group()
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)


def loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Task loss plus 0.1 times the auxiliary loss."""
    rows, balance = outputs
    return functional.mse_loss(rows, targets) + 0.1 * balance


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets for each step."""
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
