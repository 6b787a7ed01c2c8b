"""Dropout masks as data: one device and ranks drop the same elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from equivcheck import Outcome, UsageError, check_training
from equivcheck.scenario import ElementType, MixedPrecision
from equivcheck.user.randomness import MaskShapes, RowShard, mask_dropout
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence
from unit.user.programs import batches, brought, in_ddp


def build() -> nn.Module:
    """A model with two dropout modules."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2))


def channels() -> nn.Module:
    """A model that drops full channels."""
    return nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 6, 1), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(6, 2))


def in_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP2 in place."""
    fully_shard(model, mesh=mesh)


def in_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Drop elements from a column-sharded DTensor."""
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "4": RowwiseParallel()})


def in_local_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Drop elements from local columns with unknown positions."""
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "4": RowwiseParallel()})


def untouched(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Leave gradients unreduced."""


def masking(**changes: Any) -> dict[str, Any]:
    """Arguments with dropout."""
    return brought(dropout_masks=True) | {"model": build} | changes


@pytest.mark.parametrize(
    ("parallelize", "mesh", "model"),
    [
        (in_ddp, {"dp": 2}, build),
        (in_ddp, {"dp": 2}, channels),
        pytest.param(in_fsdp2, {"dp_replicate": 2, "dp_shard": 2}, build, marks=pytest.mark.slow),
        (in_dtensors, {"tp": 2}, build),
    ],
    ids=["ddp", "channels", "hsdp", "dtensors"],
)
def test_dropout_is_equivalent(parallelize: Callable[..., Any], mesh: dict[str, int], model: Callable[[], nn.Module]) -> None:
    """Ranks drop the same elements as one device, and a missing reduction still shows."""
    arguments = masking(mesh=mesh, model=model)
    check_training(**arguments | {"parallelize": parallelize}).assert_equivalent()
    if "tp" not in mesh:
        assert check_training(**arguments | {"parallelize": untouched}).outcome is Outcome.DIVERGED


def test_masks_of_microbatches_and_of_casts_are_cut_alike() -> None:
    """Each microbatch has its own mask, also if one device uses the ranks' parts."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def wide_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs.to(targets.dtype), targets)

    pairs = [list(pair) for pair in zip(batches(12), batches(12)[::-1], strict=True)]
    check_training(**masking(batches=pairs)).assert_equivalent()
    precision = MixedPrecision(param=ElementType.BFLOAT16, reduce=ElementType.FLOAT32)
    arguments = masking(batches=pairs, parallelize=sharded, loss=wide_loss)
    check_training(**arguments, precision=precision).assert_equivalent()


def test_a_rank_with_the_mask_of_another_diverges() -> None:
    """A wrong mask changes the first loss."""

    def first_mask(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        mask_dropout(model, 0, MaskShapes({("1", call): (4, 8) for call in range(9)}), RowShard(0, 2))
        return in_ddp(model, mesh)

    first = first_divergence(check_training(**masking(parallelize=first_mask)))
    assert (first.step, first.phase) == (0, Phase.LOSS)


def test_where_a_mask_cannot_be_cut_one_line_says_so() -> None:
    """Local columns have no known position."""
    with pytest.raises(UsageError, match=r"Dropout '1' has inputs \[4, 4\] on a rank and \[4, 8\] on one device\. .* eval\(\)"):
        check_training(**masking(mesh={"tp": 2}, parallelize=in_local_tensors))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_drops_the_same(reentrant: bool) -> None:
    """Activation checkpointing changes no gradient at any step."""
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = build()
        mask_dropout(model, 0, MaskShapes(), RowShard())
        inputs = torch.ones(4, 4, requires_grad=True)
        for _ in range(2):
            outputs = checkpoint(model, inputs, use_reentrant=reentrant) if recomputes else model(inputs)
            outputs.sum().backward()
        found.append(model[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.usefixtures("with_causes")
def test_the_cause_of_what_ranks_with_masks_do_wrong_is_named() -> None:
    """Emulated ranks use each rank's masks."""
    assert "left unreduced" in check_training(**masking(parallelize=untouched, mesh={"dp": 2})).cause
