"""Causes and hints name the tensors that differ: no others, and no fewer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import check_training
from equivcheck.oracle.reference.noise import FACTOR
from equivcheck.oracle.verdict.cause import Cause
from unit.user.programs import batches, brought, sgd_of


def mean(gradient: torch.Tensor) -> torch.Tensor:
    """Average a gradient over ranks."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Tokens(nn.Module):
    """An embedding of which a batch uses few rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Two values per token."""
        return self.head(self.embedding(tokens))


def test_an_innocent_tensor_is_not_suspected() -> None:
    """An element may differ by more than its share of the tolerance, if the tensor as a whole does not."""

    def nearly_right(gradient: torch.Tensor) -> torch.Tensor:
        right = mean(gradient)
        right[0, 0] += FACTOR * torch.finfo(right.dtype).eps * right.norm() / 2
        return right

    def parallelize(model: Any, _mesh: DeviceMesh) -> None:
        model.embedding.weight.register_hook(nearly_right)

    tokens = torch.tensor([0, 1, 2, 3])
    verdict = check_training(
        **brought(model=Tokens, parallelize=parallelize, optimizer=sgd_of, batches=[(tokens, batches()[0][1])])
    )
    assert verdict.kinds == (Cause.NOT_REDUCED,)
    assert verdict.cause.startswith("the gradients of `head.weight` and `head.bias` are left unreduced")


def test_a_cause_counts_the_tensors_that_it_does_not_name() -> None:
    """Four tensors lose their last row."""

    def all_but_the_last_row(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([mean(gradient)[:-1], gradient[-1:]])

    def parallelize(model: nn.Module, _mesh: DeviceMesh) -> None:
        for parameter in model.parameters():
            parameter.register_hook(all_but_the_last_row)

    model = lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))  # noqa: E731
    verdict = check_training(**brought(model=model, parallelize=parallelize, optimizer=sgd_of))
    assert "the gradients of row 2 of `0.weight`, row 2 of `0.bias` and parts of 2 more tensors are left" in verdict.cause


def test_unused_rows_of_an_embedding_do_not_limit_a_difference() -> None:
    """All gradients are wrong, but those of unused rows are zero on both sides."""

    def parallelize(model: nn.Module, _mesh: DeviceMesh) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: mean(gradient).sin())

    tokens = torch.tensor([0, 1, 2, 3])
    verdict = check_training(
        **brought(model=Tokens, parallelize=parallelize, optimizer=sgd_of, batches=[(tokens, batches()[0][1])])
    )
    assert (verdict.cause, verdict.hint) == ("", "")
