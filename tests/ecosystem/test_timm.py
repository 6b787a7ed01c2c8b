"""timm: vision models of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ecosystem import torchvision_operators  # noqa: F401 - first
from equivcheck import Outcome
from equivcheck.user.verdict import UserVerdict

timm = pytest.importorskip("timm")
CLASSES, PIXELS, ROWS, STEPS = 5, 32, 4, 2


def vision_transformer() -> nn.Module:
    """Without dropout."""
    small = {"patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", img_size=PIXELS, num_classes=CLASSES, **small)


def residual_network() -> nn.Module:
    """With batch norms."""
    return timm.create_model("resnet10t", num_classes=CLASSES, stem_width=4, channels=(4, 4, 8, 8))


def images() -> list[Any]:
    """And their classes, of each step."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(STEPS, ROWS, 3, PIXELS, PIXELS, generator=generator)
    return list(zip(pixels, torch.randint(0, CLASSES, (STEPS, ROWS), generator=generator), strict=True))


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer of such models."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Gradients averaged, statistics of batch norms each rank's own."""
    return DistributedDataParallel(model)


def by_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each block a unit of FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def with_statistics(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Batch norms that timm converts to synchronised ones."""
    return DistributedDataParallel(timm.layers.convert_sync_batchnorm(model))


def training(**given: Any) -> dict[str, Any]:
    """Arguments of `check_training`."""
    usual = {"mesh": {"dp": 2}, "batches": images(), "loss": nn.functional.cross_entropy, "optimizer": momentum}
    return usual | given


@pytest.mark.parametrize(("layout", "parallelize"), [("ViT, DDP", in_ddp), ("ViT, FSDP2", by_blocks)], ids=["ddp", "fsdp2"])
def test_a_vision_transformer_is_equivalent(checked: Callable[..., UserVerdict], layout: str, parallelize: Any) -> None:
    """Two ranks compute what one device computes."""
    verdict = checked(layout, **training(model=vision_transformer, parallelize=parallelize))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_synchronised_batch_norms_are_equivalent(checked: Callable[..., UserVerdict]) -> None:
    """Statistics of all rows, where torch has them on CPU."""
    verdict = checked("ResNet, DDP, convert_sync_batchnorm", **training(model=residual_network, parallelize=with_statistics))
    if verdict.outcome is Outcome.CRASHED and "SyncBatchNorm" in verdict.describe():
        pytest.skip("torch's SyncBatchNorm is for CUDA only")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_batch_norms_that_are_not_synchronised(checked: Callable[..., UserVerdict]) -> None:
    """Each rank has the statistics of its rows: the first batch norm differs."""
    verdict = checked("wrong: ResNet, DDP, batch norms not synchronised", **training(model=residual_network, parallelize=in_ddp))
    assert verdict.outcome is Outcome.DIVERGED, verdict.describe()
    assert "conv1.1 (forward" in verdict.where, "the first batch norm"
    assert "not a mean over rows" in (verdict.cause or verdict.hint), verdict.describe()
