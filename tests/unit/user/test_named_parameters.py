"""Optimizers that choose settings by parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from equivcheck import check_training
from equivcheck.oracle.verdict.cause import Cause
from unit.user.programs import brought, in_ddp

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


def without_decay_of_biases(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups, as many trainings have them."""
    assert [name for name, _ in named_parameters] == NAMES
    decayed = [value for name, value in named_parameters if not name.endswith("bias")]
    rest = [value for name, value in named_parameters if name.endswith("bias")]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def in_fsdp1(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """FSDP1 with a flat parameter behind the original ones."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def in_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2."""
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("parallelize", [in_ddp, in_fsdp1, in_fsdp2])
def test_names_are_those_of_the_model(parallelize: Callable[..., Any]) -> None:
    """Wrappers do not change them."""
    check_training(**brought(parallelize=parallelize, optimizer=without_decay_of_biases)).assert_equivalent()


def test_torch_takes_the_pairs_as_they_are() -> None:
    """`torch.optim` accepts named parameters."""
    check_training(**brought(optimizer=lambda named_parameters: torch.optim.Adam(named_parameters, lr=0.01))).assert_equivalent()


@pytest.mark.usefixtures("with_causes")
def test_a_cause_is_found_with_names() -> None:
    """The diagnosis calls the same function."""

    def twice(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
        return DistributedDataParallel(model)

    verdict = check_training(**brought(parallelize=twice, optimizer=without_decay_of_biases))
    assert verdict.kinds == (Cause.SUMMED,)
