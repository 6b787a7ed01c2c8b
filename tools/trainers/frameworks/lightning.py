"""Configurations of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import Outcome, check_training
from equivcheck.scenario import LowPrecision
from equivcheck.user.trainers.lightning import Lightning
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.settings import rows_of_layouts
from tools.trainers.rows import Framework, Row

VERSION = "2.6.6"


def model() -> nn.Module:
    """Hidden features that two ranks share equally, and outputs that they do not."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def shard(built: nn.Module, mesh: Any) -> None:
    """FSDP2."""
    for layer in built.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(built, mesh=mesh["data_parallel"])


def split(built: nn.Module, mesh: Any) -> None:
    """Tensor parallelism."""
    parallelize_module(built, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def split_and_shard(built: nn.Module, mesh: Any) -> None:
    """Both."""
    split(built, mesh)
    shard(built, mesh)


LAYOUTS: dict[str, tuple[dict[str, int], Callable[[nn.Module, Any], None] | None]] = {
    "DDP": ({"dp": 2}, None),
    "FSDP2": ({"dp": 2}, shard),
    "TP": ({"tp": 2}, split),
    "FSDP2 x TP": ({"dp": 2, "tp": 2}, split_and_shard),
}
"""Mesh and the function that distributes the model. None for DDP."""


def check(
    layout: str, num_microbatches: int, limit: float, module: Callable[..., Any] | None = None, *, precision: str = ""
) -> UserVerdict:
    """Two updates."""
    mesh, parallelize = LAYOUTS[layout]
    arguments: dict[str, Any] = {"gradient_clip_val": limit or None, "precision": precision or None}
    if parallelize is not None:
        from lightning.pytorch.strategies import ModelParallelStrategy  # type: ignore[import-not-found, unused-ignore]

        sizes = {"data_parallel_size": mesh.get("dp", 1), "tensor_parallel_size": mesh.get("tp", 1)}
        arguments["strategy"] = ModelParallelStrategy(**sizes)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return check_training(
        model=model,
        trainer=Lightning(arguments=arguments, parallelize=parallelize, module=module),
        mesh=mesh,
        batches=[[(draw(6, 3), draw(6, 3)) for _ in range(num_microbatches)] for _ in range(2)],
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        world="gloo",
        dtype=torch.float32 if precision else torch.float64,
        precision=LowPrecision.BFLOAT16 if precision else None,
    )


def divided_again(network: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> Any:
    """A module that divides by the number of microbatches, as Lightning has done already."""
    from lightning.pytorch import LightningModule  # type: ignore[import-not-found, unused-ignore]

    class Divided(LightningModule):  # type: ignore[misc, unused-ignore]
        """A user's module."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            """Divide."""
            return loss(self.network(batch[0]), batch[1]) / 3

    return Divided()


def _rows() -> Iterator[Row]:
    yield from rows_of_layouts(VERSION, LAYOUTS, check)
    for name, number in (("1 microbatch", 1), ("3 microbatches", 3)):
        mixed = partial(check, "DDP", number, 0.1, precision="bf16-mixed")
        yield Row(version=VERSION, configuration=f"DDP, bf16-mixed, {name}, clipping", check=mixed)
    yield Row(
        version=VERSION,
        configuration="planted: divided by the number of microbatches, DDP, bf16-mixed, 3 microbatches",
        check=partial(check, "DDP", 3, 0.0, divided_again, precision="bf16-mixed"),
        expected=Outcome.DIVERGED,
        cause="step 0 loss",
    )
    yield Row(
        version=VERSION,
        configuration="planted: divided by the number of microbatches, DDP, 3 microbatches",
        check=partial(check, "DDP", 3, 0.0, divided_again),
        expected=Outcome.DIVERGED,
        cause="gradient and loss are divided by the number of microbatches twice",
    )


LIGHTNING = Framework(
    name="Lightning",
    versions={VERSION: (f"lightning=={VERSION}", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")},
    rows=(*_rows(),),
)
