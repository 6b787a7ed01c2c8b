"""A pipeline with two stages and data parallelism, with gradients clipped by the norm over both stages.

Ranks need their own training step, because a `torch.distributed.pipelining` schedule runs forward and backward, and only the last
stage has a loss. Run it with ``python examples/pipeline.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from equivcheck import check_training

NUM_CHUNKS, MAX_NORM = 2, 0.1


class Stage(nn.Module):
    """One rank's layers and the schedule that runs them."""

    def __init__(self, layers: nn.Sequential, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layers, self.mesh = layers, mesh
        self.number, self.is_last = mesh.get_local_rank("pp"), mesh.get_local_rank("pp") == mesh["pp"].size() - 1
        stage = PipelineStage(layers, self.number, mesh["pp"].size(), torch.device("cpu"), group=mesh.get_group("pp"))
        self.schedule = ScheduleGPipe(stage, NUM_CHUNKS, loss_fn=functional.mse_loss)

    def average(self) -> None:
        """Average gradients over the data-parallel ranks, which run the same stage on other rows."""
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.mesh.get_group("dp"))
            parameter.grad /= self.mesh["dp"].size()

    def clip(self) -> None:
        """Clip by the norm over all stages. The stages sum their squared norms."""
        parameters = list(self.parameters())
        total = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
        dist.all_reduce(total, group=self.mesh.get_group("pp"))
        nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, total.sqrt())


def build() -> nn.Sequential:
    """Four linears with tanh between them."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Keep this rank's half of the model."""
    return Stage(model[:4] if mesh.get_local_rank("pp") == 0 else model[4:], mesh)


def one_device_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Run forward and backward, clip the gradients and update the parameters."""
    inputs, targets = batch
    optimizer.zero_grad()
    value = loss(model(inputs), targets)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return value


def rank_step(stage: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor | None:
    """Run the same step with the schedule, which averages gradients over the microbatches."""
    inputs, targets = batch
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    stage.schedule.step(*((inputs,) if stage.number == 0 else ()), target=targets if stage.is_last else None, losses=losses)
    stage.average()
    stage.clip()
    optimizer.step()
    return torch.stack(losses).mean() if losses else None


def main() -> None:
    """Check three Adam steps on 2 x 2 ranks."""
    generator = torch.Generator().manual_seed(0)
    verdict = check_training(
        model=build,
        parallelize=parallelize,
        mesh={"dp": 2, "pp": 2},
        batches=[(torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(3)],
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        step=one_device_step,
        rank_step=rank_step,
    )
    print(verdict.describe())
    verdict.assert_equivalent()


if __name__ == "__main__":
    main()
