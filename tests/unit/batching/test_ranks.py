"""A right step gives the same gradients if its examples are distributed over ranks. A wrong one does not, with its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, UsageError
from equivcheck.arrangements.arrangement import Kind
from equivcheck.batching.check import check_batching
from unit.batching import steps
from unit.batching.steps import Batch, Causal, losses, summed, tokens

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Wrap in DDP. The router has no loss."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def in_fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard in place."""
    return fully_shard(model, mesh=mesh)


def not_reduced(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Mistake: ranks keep their own gradients."""


def over_ranks(number: torch.Tensor) -> torch.Tensor:
    """Sum over ranks."""
    total = number.double()
    dist.all_reduce(total)
    return total


def step_with(divisor: Callable[[Batch, list[Batch]], Any]) -> Any:
    """Step that divides each microbatch's summed loss."""
    return steps.step_of(lambda model, batch, batches: losses(model, batch).sum() / divisor(batch, batches))


def count_of_all(_batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Counted tokens in all microbatches on all ranks, for gradients that are averaged over ranks."""
    return over_ranks(summed(steps.count, batches)).clamp(min=1) / dist.get_world_size()


@pytest.mark.parametrize(
    ("parallelize", "num_ranks"), [(in_ddp, 2), (in_ddp, 3), (in_fsdp2, 2)], ids=["ddp@2", "ddp@3", "fsdp2@2"]
)
def test_a_right_step_is_equivalent_on_ranks(parallelize: Parallelize, num_ranks: int) -> None:
    """For even and uneven splits, and if a rank has no labels."""
    verdict = check_batching(
        model=Causal,
        step=steps.token_mean,
        rank_step=step_with(count_of_all),
        batch=tokens(),
        normaliser="token",
        mesh={"dp": num_ranks},
        parallelize=parallelize,
    )
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    names = {result.name for result in verdict.results}
    assert {
        "rows split over ranks",
        "one row on each rank but the first",
        "a rank without labels",
        "all rows on each rank",
    } <= names


@pytest.mark.parametrize(
    ("parallelize", "rank_step", "cause"),
    [
        (
            in_ddp,
            step_with(lambda _, batches: summed(steps.count, batches).clamp(min=1)),
            "mean over the counted tokens of all microbatches, on each rank, then the mean over ranks (explains all",
        ),
        (
            in_ddp,
            step_with(lambda _, batches: over_ranks(summed(steps.count, batches))),
            "mean over the counted tokens of all microbatches, then divided by the number of ranks (explains all",
        ),
        (
            in_fsdp2,
            step_with(lambda batch, batches: steps.count(batch).clamp(min=1) * len(batches)),
            "on ranks the step is the mean over the counted tokens of each microbatch, then the mean over microbatches (explains",
        ),
        (not_reduced, step_with(count_of_all), "gradients are not reduced: their mean over ranks would be right"),
        (
            not_reduced,
            step_with(lambda _, batches: over_ranks(summed(steps.count, batches))),
            "gradients are not reduced: their sum over ranks would be right",
        ),
    ],
    ids=["own count", "count of all, averaged", "mean of means", "not reduced", "not summed"],
)
def test_a_wrong_step_on_ranks_diverges_with_its_cause(parallelize: Parallelize, rank_step: Any, cause: str) -> None:
    """All arrangements on one device agree."""
    verdict = check_batching(
        model=Causal,
        step=steps.token_mean,
        rank_step=rank_step,
        batch=tokens(),
        mesh={"dp": 2},
        parallelize=parallelize,
        normaliser="token",
    )
    assert verdict.outcome is Outcome.DIVERGED
    assert next(result for result in verdict.results if result.divergence is not None).kind is Kind.RANKS
    assert verdict.cause.startswith(cause), verdict
    assert "one device and dp 2 in sim" in " ".join(str(verdict).split())


def test_fewer_examples_than_ranks_are_noted() -> None:
    """Only a batch on each rank is left to check."""
    batch = {name: tensor[:2] for name, tensor in tokens().items()}
    verdict = check_batching(
        model=Causal,
        step=steps.token_mean,
        rank_step=step_with(count_of_all),
        batch=batch,
        mesh={"dp": 3},
        parallelize=in_fsdp2,
    )
    assert verdict.notes == ("2 examples are too few for 3 data ranks, so they are not split",)
    assert [result.name for result in verdict.results if result.kind is Kind.TWICE][-1] == "all rows on each rank"


def test_ranks_that_fail_are_named() -> None:
    """The step is right for one microbatch, so the outcome is that of the ranks."""

    def fails(model: Any, batches: list[Any], optimizer: Any, loss: Any) -> None:
        if len(batches) > 1:
            raise RuntimeError("no accumulation")
        step_with(count_of_all)(model, batches, optimizer, loss)

    verdict = check_batching(
        model=Causal, step=steps.token_mean, rank_step=fails, batch=tokens(), mesh={"dp": 2}, parallelize=in_fsdp2
    )
    assert verdict.outcome is Outcome.CRASHED
    assert "two microbatches on each rank: " in verdict.reason
    assert "no accumulation" in verdict.reason


def test_ranks_that_hang_are_hung() -> None:
    """A collective that only one rank calls."""

    def hangs(model: Any, batches: list[Any], optimizer: Any, loss: Any) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))
        steps.token_mean(model, batches, optimizer, loss)

    verdict = check_batching(
        model=Causal, step=steps.token_mean, rank_step=hangs, batch=tokens(), mesh={"dp": 2}, parallelize=not_reduced
    )
    assert verdict.outcome is Outcome.HUNG, verdict


@pytest.mark.parametrize("given", [{"mesh": {"dp": 2}}, {"parallelize": in_ddp}])
def test_a_mesh_needs_parallelize(given: dict[str, Any]) -> None:
    """And the other way round."""
    with pytest.raises(UsageError, match="is not valid: training on ranks needs both"):
        check_batching(model=Causal, step=steps.token_mean, batch=tokens(), **given)
