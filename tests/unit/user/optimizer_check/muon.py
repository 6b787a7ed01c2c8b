"""A handwritten Muon for sharded and replicated parameters. Its arguments plant mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iterations, as in https://kellerjordan.github.io/posts/muon."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / (found.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.T if is_tall else found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Muon(torch.optim.Optimizer):
    """Muon for matrices, with a fused weight for query, key and value in three parts. Momentum for other parameters."""

    def __init__(  # noqa: PLR0913 - mistakes
        self,
        named: list[tuple[str, nn.Parameter]],
        *,
        decay: float = 0.1,
        gathers: bool = True,
        decays_vectors: bool = False,
        splits_fused: bool = True,
        scales_by_shard: bool = False,
        factor: float = 1.0,
        times: int = 1,
        skips: Callable[[str, torch.Tensor], bool] = lambda _name, _parameter: False,
    ) -> None:
        kinds = {True: decay, False: decay if decays_vectors else 0.0}
        groups = []
        for is_matrix, own_decay in kinds.items():
            kept = [(name, parameter) for name, parameter in named if (parameter.dim() == 2) is is_matrix]
            if kept:
                names, parameters = zip(*kept, strict=True)
                groups.append({"params": list(parameters), "names": names, "weight_decay": own_decay})
        super().__init__(groups, {"lr": 0.05})
        self.gathers, self.splits_fused, self.scales_by_shard = gathers, splits_fused, scales_by_shard
        self.factor, self.times, self.skips = factor, times, skips

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                for _ in range(0 if self.skips(name, parameter) else self.times):
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad, alpha=self.factor)
                    local(parameter).mul_(1.0 - group["lr"] * group["weight_decay"])
                    update = self.matrix_update(name, momentum) if parameter.dim() == 2 else local(momentum)
                    local(parameter).sub_(update, alpha=group["lr"])

    def matrix_update(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the update."""
        full = momentum.full_tensor() if self.gathers and isinstance(momentum, DTensor) else local(momentum)
        if not full.numel():
            return full
        parts = full.chunk(3) if self.splits_fused and "qkv" in name else [full]
        shape = local(momentum).shape if self.scales_by_shard else full.shape
        update = torch.cat(list(map(orthogonalized, parts))) * max(1.0, shape[0] / shape[1]) ** 0.5
        if self.gathers and isinstance(momentum, DTensor):
            update = local(distribute_tensor(update, momentum.device_mesh, momentum.placements))
        return update
