"""Positions that start at 0 again on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, check_training
from equivcheck.oracle.verdict.cause import Cause
from unit.user.diagnosis.test_attention_masks import LENGTH, batches, part_of
from unit.user.programs import brought, sgd_of


class Positioned(nn.Module):
    """A model that adds an embedding to each position. `numbers` are the positions of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(LENGTH, 4), nn.Linear(4, 2)
        self.register_buffer("angles", torch.arange(LENGTH) / LENGTH)
        self.added: Callable[..., torch.Tensor] = embedded
        self.restarts = False

    def forward(self, inputs: torch.Tensor, _documents: torch.Tensor) -> torch.Tensor:
        """Add the embeddings, then apply the head."""
        size = inputs.shape[1]
        first = size * dist.get_rank() if dist.is_initialized() and not self.restarts else 0
        return self.head(torch.tanh(inputs * self.added(self, first, size)))


def embedded(model: Positioned, first: int, size: int) -> torch.Tensor:
    """Look up numbers."""
    return model.table(torch.arange(size) + first)


def sliced(model: Positioned, first: int, size: int) -> torch.Tensor:
    """Read rows of a parameter."""
    return model.table.weight[first : first + size]


def from_buffer(model: Positioned, first: int, size: int) -> torch.Tensor:
    """Read rows of a buffer, such as the cosines of a rotary embedding."""
    return model.angles[None, first : first + size, None][0].cos() + 0 * model.table.weight.sum()


def from_list(model: Positioned, first: int, size: int) -> torch.Tensor:
    """Look up numbers that torch does not count."""
    return model.table.weight[list(range(first, first + size))]


def from_two_places(model: Positioned, first: int, size: int) -> torch.Tensor:
    """Count in two lines."""
    return model.table(torch.arange(size) + first) + from_buffer(model, first, size)


def checked(added: Callable[..., torch.Tensor], *, restarts: bool) -> Any:
    """A verdict on context-parallel ranks."""

    def parallelize(model: Any, _mesh: Any) -> nn.Module:
        model.restarts, model.added = restarts, added
        return DistributedDataParallel(model)

    def build() -> nn.Module:
        model = Positioned()
        model.added = added
        return model

    given = {"mesh": {"cp": 2}, "shard": part_of, "batches": batches(), "optimizer": sgd_of}
    return check_training(**brought(model=build, parallelize=parallelize, **given))


@pytest.mark.parametrize(
    ("added", "line"),
    [
        (embedded, "`return model.table(torch.arange(size) + first)`"),
        (sliced, "`return model.table.weight[first : first + size]`"),
        (from_buffer, "`return model.angles[None, first : first + size, None][0].cos() + 0 * model.table.weight.sum()`"),
        (from_two_places, "`return model.table(torch.arange(size) + first) + from_buffer(model, first, size)`"),
    ],
)
def test_positions_that_restart_on_each_rank_are_named_with_their_line(added: Callable[..., torch.Tensor], line: str) -> None:
    """The line counts positions, or reads a table up to the number of positions."""
    assert checked(added, restarts=False).outcome is Outcome.EQUIVALENT
    verdict = checked(added, restarts=True)
    assert verdict.kinds == (Cause.POSITIONS,)
    assert verdict.cause.startswith(f"positions start at 0 again on each of the 2 cp ranks, in {line} (test_positions.py:")


def labelled() -> list[Any]:
    """Two steps with tokens and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(5, (2, 2, LENGTH), generator=generator) for _ in range(2)]
    drawn[0][1, 0, :2] = drawn[1][1, 1, 3:5] = -100
    return [(tokens, labels) for tokens, labels in drawn]


def own_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of the labels."""
    return labels.chunk(2, 1)[dist.get_rank()] if dist.is_initialized() else labels


def without_last(labels: torch.Tensor) -> torch.Tensor:
    """Ignore the label after which the first rank's part ends."""
    if dist.is_initialized() and not dist.get_rank():
        labels = labels.clone()
        labels[:, -1] = -100
    return labels


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels once more on ranks."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1) if dist.is_initialized() else labels


@pytest.mark.parametrize(
    ("mesh", "changed", "says"),
    [
        ("cp", own_labels, "each of the 2 cp ranks divides its loss by its own number of labels, and the results are averaged"),
        ("cp", lambda labels: without_last(own_labels(labels)), "the last label of each of the 2 cp ranks is lost"),
        ("tp", shifted, "labels are shifted: each position is compared with the label of the next position"),
    ],
    ids=["own_number", "last_label", "shifted"],
)
def test_wrong_labels_are_named(mesh: str, changed: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    """Labels are lost, shifted, or counted on each rank."""

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = changed(labels)
        return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        tokens = own_labels(batch[0]) if mesh == "cp" else batch[0]
        optimizer.zero_grad()
        value = loss(model(tokens), batch[1])
        value.backward()
        optimizer.step()
        if dist.is_initialized():
            value = value.detach()
            dist.all_reduce(value, op=dist.ReduceOp.AVG)
        return value

    given = {"model": lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), "loss": loss, "step": step}
    verdict = check_training(**brought(mesh={mesh: 2}, batches=labelled(), optimizer=sgd_of, **given))
    assert verdict.cause.startswith(says)


def test_positions_that_torch_does_not_count_are_not_named() -> None:
    """Numbers in a list may be anything."""
    assert not checked(from_list, restarts=True).cause
