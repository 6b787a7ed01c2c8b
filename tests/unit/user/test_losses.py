"""Losses and other values that `step` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from equivcheck import Outcome, check_training
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Difference, Phase
from unit.user.programs import brought


def returning(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """A step that returns a changed loss and is correct otherwise."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        inputs, targets = batch
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        return change(value.detach())

    return step


def off_by(*errors: float) -> Callable[..., Any]:
    """A step whose loss is off by another error on each rank."""
    return returning(lambda value: value + errors[dist.get_rank()])


right = returning(lambda value: value)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_ranks_with_the_same_rows_must_return_the_same_loss(axis: str) -> None:
    """Opposite errors on two ranks are found, although their mean is right."""
    verdict = check_training(**brought(mesh={axis: 2}, step=right, rank_step=off_by(-0.1, 0.1)))
    found = verdict.divergence
    assert (verdict.outcome, found.phase, found.difference, found.rank) == (
        Outcome.DIVERGED,
        Phase.LOSS,
        Difference.RANKS_DISAGREE,
        1,
    )
    assert float(found.actual) == pytest.approx(float(found.expected) + 0.1)
    assert "rank 0 has" in found.elsewhere
    assert axis in verdict.hint


def test_the_wrong_one_of_four_ranks_is_named() -> None:
    """Data ranks have different losses. Each is compared with the tensor-parallel rank that has the same rows."""
    verdict = check_training(**brought(mesh={"dp": 2, "tp": 2}, step=right, rank_step=off_by(0, 0, 0.1, 0)))
    assert (verdict.divergence.difference, verdict.divergence.rank) == (Difference.RANKS_DISAGREE, 2)
    assert "ranks 2, 3" in verdict.divergence.expected


def test_a_wrong_loss_names_its_ranks() -> None:
    """All ranks have the same wrong loss."""
    verdict = check_training(**brought(mesh={"tp": 2}, step=right, rank_step=off_by(0.1, 0.1)))
    assert (verdict.divergence.difference, verdict.divergence.ranks) == (Difference.VALUE, (0, 1))


@pytest.mark.parametrize(
    ("mesh", "rank_step", "options"),
    [
        ({"dp": 2}, off_by(-0.1, 0.1), {}),
        ({"cp": 2}, off_by(-0.1, 0.1), {}),
        ({"tp": 2}, off_by(-0.1, 0.1), {"shard": lambda batch, mesh: batch}),
        ({"pp": 2}, returning(lambda value: value if dist.get_rank() else None), {}),
        ({"dp": 2, "tp": 2}, right, {}),
    ],
    ids=["other_rows", "own_positions", "own_shards", "one_without", "data_and_tensor"],
)
def test_losses_may_differ(mesh: dict[str, int], rank_step: Any, options: dict[str, Any]) -> None:
    """Losses may differ if rows or positions differ or are unknown. A rank may have no loss."""
    check_training(**brought(mesh=mesh, step=right, rank_step=rank_step, **options)).assert_equivalent()


@pytest.mark.usefixtures("with_causes")
def test_the_rank_whose_loss_is_scaled_is_the_cause() -> None:
    """One rank returns half of its loss."""
    halved = returning(lambda value: value / 2 if dist.get_rank() == 3 else value)
    verdict = check_training(**brought(mesh={"dp": 2, "tp": 2}, step=right, rank_step=halved))
    assert verdict.kinds == (Cause.SCALED,)
    assert "0.5 times the loss on rank 3" in verdict.cause
    assert verdict.measures.loss == pytest.approx(verdict.measures.expected_loss, rel=0.5)
