"""Findings of Megatron-LM #7452 about tokens that are counted on each rank, and means that are divided by the wrong count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from exam.collectives import own, total
from exam.item import Trained
from exam.trainings import WIDTH, as_it_is, in_ddp, numbers, reduced, usual, world

ROWS, SEQUENCE = 4, 4


# 3: a second loss whose tokens are counted for each rank


class TwoPredictions(nn.Module):
    """Of the next token, and of the one after that."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.second = (nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width) and (rows, sequence, 2)."""
        return torch.cat([self.next(x), self.second(x)], dim=-1)


def masked_rows() -> list[Any]:
    """Rows whose number of tokens with a label differs from rank to rank, and by one more or less for the second loss."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
    return [(*batch, mask) for batch in numbers((ROWS, SEQUENCE, WIDTH), (ROWS, SEQUENCE, 2))]


def two_losses(*, counts_of_microbatch: bool) -> Any:
    """Sums over tokens, the second as if it had as many tokens as the first, divided by all tokens at the end."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        inputs, targets, mask = batch
        optimizer.zero_grad()
        shifted = functional.pad(mask[:, 1:], (0, 1)).to(inputs.dtype)
        squares = (model(inputs) - targets) ** 2
        own_tokens = torch.stack([mask.sum(), shifted.sum()]).to(inputs.dtype)
        tokens = total(own_tokens, world()) if dist.is_initialized() else own_tokens
        first, second = own_tokens if counts_of_microbatch else tokens
        value = ((squares[..., 0] * mask).sum() + (squares[..., 1] * shifted).sum() * first / second) / tokens[0]
        value.backward()
        if dist.is_initialized():
            reduced(model.parameters(), world(), average=False)
            value = value * world().size()
        optimizer.step()
        return value.detach()

    return step


def own_counts_of_second_loss() -> Trained:
    """Two ranks, of which the second has fewer tokens."""
    brought = usual(
        model=TwoPredictions,
        mesh={"dp": 2},
        parallelize=as_it_is,
        batches=masked_rows(),
        step=two_losses(counts_of_microbatch=False),
    )
    return Trained(brought, {"rank_step": two_losses(counts_of_microbatch=True)})


# 9: parts of a sequence, each with the mean over its own tokens


def mean_over_tokens(predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Those that are not to be predicted are NaN."""
    known = ~targets.isnan()
    return ((predicted - targets.nan_to_num()) ** 2 * known).sum() / known.sum()


def step_of_part(*, own_count: bool) -> Any:
    """Of a rank whose gradients DDP averages."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        known = ~targets.isnan()
        count = known.sum().to(inputs.dtype) if own_count else total(known.sum().to(inputs.dtype), world()) / world().size()
        value = ((model(inputs) - targets.nan_to_num()) ** 2 * known).sum() / count
        value.backward()
        optimizer.step()
        return total(value, world()) / world().size()

    return step


def part_of_sequence(batch: Any, mesh: DeviceMesh) -> Any:
    """All rows, some positions."""
    return tuple(own(each, 1, mesh.get_group()) for each in batch)


def half_known() -> list[Any]:
    """Sequences of which more is known at the end."""
    batches = numbers((ROWS, SEQUENCE, WIDTH), (ROWS, SEQUENCE, 1))
    for _, targets in batches:
        targets[:, 0] = float("nan")
    return list(batches)


def own_count_of_part() -> Trained:
    """Two parts."""
    brought = usual(
        model=lambda: nn.Linear(WIDTH, 1),
        mesh={"cp": 2},
        parallelize=in_ddp,
        batches=half_known(),
        loss=mean_over_tokens,
        shard=part_of_sequence,
        rank_step=step_of_part(own_count=False),
    )
    return Trained(brought, {"rank_step": step_of_part(own_count=True)})


# 10 and appendix C: the auxiliary loss of a router


class Router(nn.Module):
    """Rows to what they are multiplied with, and to the probabilities of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width)."""
        return self.router(x).softmax(-1)


def balance(probabilities: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The part that rows have in the auxiliary loss of all: shares of experts times mean probabilities, summed over the rows."""
    shares = functional.one_hot(probabilities.argmax(-1), WIDTH).sum(0).to(probabilities.dtype)
    shares = shares if group is None else total(shares, group)
    return (shares / shares.sum() * probabilities).sum()


def with_balance(weight: Any) -> Any:
    """A step: the task, and the auxiliary loss as it is weighted on ranks."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        probabilities = model(inputs)
        task, group = loss(probabilities, targets), world() if dist.is_initialized() else None
        value = task + balance(probabilities, group) * weight(len(inputs))
        value.backward()
        optimizer.step()
        return task.detach()

    return step


def mean_over_rows(rows: int) -> float:
    """What DDP averages over ranks with equally many rows."""
    return 1 / rows


def count_overwritten(rows: int) -> float:
    """The mean over a rank's own rows, weighted by a count of rows that the sum over ranks has overwritten."""
    count = torch.tensor(float(rows))
    dist.all_reduce(count)
    return float(count) / rows / rows


def divided_twice(rows: int) -> float:
    """Divided by the rows of all ranks, although DDP averages what it is given."""
    return 1 / (rows * world().size())


def auxiliary(weight: Any) -> Any:
    """Two data-parallel ranks."""

    def program() -> Trained:
        brought = usual(
            model=Router,
            mesh={"dp": 2},
            parallelize=in_ddp,
            step=with_balance(mean_over_rows),
        )
        return Trained(brought, {"rank_step": with_balance(weight)})

    return program
