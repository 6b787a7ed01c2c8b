"""Lightning Fabric: it reads the environment that launchers set, so that ranks are processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ecosystem import rows
from equivcheck import Outcome
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.verdict import UserVerdict


def launched(strategy: Any) -> Fabric:
    """Fabric on both ranks."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == 2
    return fabric


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """By its strategy `ddp`."""
    fabric = launched("ddp")
    wrapped = fabric.setup_module(model)
    wrapped.fabric = fabric
    return wrapped


def in_fsdp2(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """By its strategy for models that users parallelize, over a mesh that it makes."""

    def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return fully_shard(module, mesh=mesh["data_parallel"])

    wrapped = launched(ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)).setup_module(model)
    assert isinstance(wrapped.module, FSDPModule)
    return wrapped


def step(is_synced: Callable[[int], bool]) -> Callable[..., float]:
    """A step by Fabric's own backward and its own context, where `is_synced` says which microbatches communicate."""

    def train(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for index, (inputs, targets) in enumerate(batch):
            with model.fabric.no_backward_sync(model, enabled=not is_synced(index)):
                value = loss(model(inputs), targets) / rows.MICROBATCHES
                model.fabric.backward(value)
                total += value.item()
        optimizer.step()
        return total

    return train


@pytest.mark.parametrize(
    ("layout", "training"),
    [
        ("DDP by setup_module", {"parallelize": in_ddp}),
        ("FSDP2 by ModelParallelStrategy", {"parallelize": in_fsdp2}),
        (
            "DDP, no_backward_sync in the first of 2 microbatches",
            {
                "parallelize": in_ddp,
                "rank_step": step(lambda index: index == rows.MICROBATCHES - 1),
                "batches": rows.batches(microbatches=rows.MICROBATCHES),
            },
        ),
    ],
    ids=["ddp", "fsdp2", "accumulation"],
)
def test_what_fabric_sets_up_is_equivalent(checked: Callable[..., UserVerdict], layout: str, training: dict[str, Any]) -> None:
    """Two ranks compute what one device computes."""
    verdict = checked(layout, **rows.training(world="gloo", **training))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_no_backward_sync_in_the_wrong_microbatch(checked: Callable[..., UserVerdict]) -> None:
    """Only the first microbatch is averaged: that of the last is each rank's own."""
    given = {"rank_step": step(lambda index: index == 0), "batches": rows.batches(microbatches=rows.MICROBATCHES)}
    verdict = checked("wrong: no_backward_sync in the last", **rows.training(parallelize=in_ddp, world="gloo", **given))
    assert verdict.outcome is Outcome.DIVERGED, verdict.describe()
    assert Cause.NOT_REDUCED in verdict.kinds, verdict.describe()
