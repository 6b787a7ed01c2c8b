"""Muon with sharded matrices, each orthogonalised by the rank that owns it: one table row for each layout.

Muon steps along the orthogonalised momentum of a full matrix, but under `fully_shard` each rank holds only a shard. Each matrix
therefore has an owner. One all-to-all sends the momentum's shards to the owner, which orthogonalises it, and a second one returns
the shards. Other parameters use plain momentum. Run it with ``equivcheck matrix examples/distributed_muon.py``. One layout is
wrong on purpose:

- DeepSpeed issue #8437: each rank orthogonalises its own shard, so the update depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import equivcheck

FEATURES, HIDDEN, ROWS, STEPS = 5, 6, 8, 3
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

Together = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Function from the momenta of all matrices to this rank's updates."""


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Run five Newton-Schulz iterations, as in https://kellerjordan.github.io/posts/muon."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(5):
        square = x @ x.T
        x = first * x + (third * square + fifth * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def each(momenta: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthogonalise each tensor on this rank. Correct for full matrices, and the bug for shards."""
    return [orthogonalised(local(momentum)) for momentum in momenta]


def gathered(momenta: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthogonalise every matrix on every rank, and keep this rank's shards."""
    return [
        rows_of(orthogonalised(momentum.full_tensor()), momentum.device_mesh.size())[momentum.device_mesh.get_rank()]
        for momentum in momenta
    ]


def by_owners(momenta: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthogonalise matrix `j` on rank `j` modulo the number of ranks."""
    group = momenta[0].device_mesh.get_group()
    count, rank = group.size(), group.rank()
    owned = range(rank, len(momenta), count)
    sent = [[local(momenta[j]) for j in range(owner, len(momenta), count)] for owner in range(count)]
    shapes = [[rows_of(momenta[j], count)[source] for j in owned] for source in range(count)]
    shards = exchanged(sent, shapes, group)
    whole = [orthogonalised(torch.cat([shards[source][number] for source in range(count)])) for number in range(len(owned))]
    back = [[rows_of(matrix, count)[target] for matrix in whole] for target in range(count)]
    found = exchanged(back, sent, group)
    return [found[j % count][j // count] for j in range(len(momenta))]


def exchanged(
    sent: list[list[torch.Tensor]], like: list[list[torch.Tensor]], group: dist.ProcessGroup
) -> list[list[torch.Tensor]]:
    """Exchange lists of matrices in one all-to-all. Received matrices get the shapes in `like`."""
    outgoing = torch.cat([torch.empty(0), *(matrix.reshape(-1) for some in sent for matrix in some)]).double()
    sizes = [sum(matrix.numel() for matrix in some) for some in like]
    incoming = outgoing.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, [sum(matrix.numel() for matrix in some) for some in sent], group=group)
    parts = [part.split([matrix.numel() for matrix in some]) for part, some in zip(incoming.split(sizes), like, strict=True)]
    return [
        [flat.view(matrix.shape) for flat, matrix in zip(part, some, strict=True)] for part, some in zip(parts, like, strict=True)
    ]


def rows_of(matrix: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Shards of a matrix by rows. The last ones may be smaller or empty."""
    parts = list(torch.empty(matrix.shape).chunk(count)) if isinstance(matrix, DTensor) else list(matrix.chunk(count))
    return parts + [parts[0][:0]] * (count - len(parts))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Muon(torch.optim.Optimizer):
    """Muon for matrices, plain momentum for other parameters. A parameter's `together` attribute orthogonalises all matrices."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            matrices = [parameter for parameter in group["params"] if parameter.dim() == 2]
            momenta = {parameter: self.momentum(parameter, group["momentum"]) for parameter in group["params"]}
            together: Together = getattr(matrices[0], "together", each)
            updates = {parameter: local(momentum) for parameter, momentum in momenta.items()}
            updates |= zip(matrices, together([momenta[parameter] for parameter in matrices]), strict=True)
            for parameter, update in updates.items():
                local(parameter).sub_(update, alpha=group["lr"])

    def momentum(self, parameter: nn.Parameter, factor: float) -> torch.Tensor:
        """Momentum after this step's gradient."""
        state = self.state[parameter]
        state.setdefault("momentum", torch.zeros_like(parameter)).mul_(factor).add_(parameter.grad)
        return state["momentum"]


def model() -> nn.Module:
    """Model with four matrices, whose shards differ in size."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3), nn.Linear(3, 2)
    )


def shard(model: nn.Module, mesh: DeviceMesh, *, together: Together) -> None:
    """Shard the model with FSDP2 and set how its matrices are orthogonalised."""
    fully_shard(model, mesh=mesh)
    for parameter in model.parameters():
        parameter.together = together


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets for each step."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, 2, generator=generator)) for _ in range(STEPS)]


matrix = equivcheck.Matrix(
    model=model,
    batches=batches(),
    loss=nn.functional.mse_loss,
    optimizer=Muon,
    layouts={
        "DDP": {"mesh": {"dp": 2}, "parallelize": lambda model, _mesh: DistributedDataParallel(model)},
        "FSDP2, gathered": {"mesh": {"dp": 2}, "parallelize": partial(shard, together=gathered)},
        "FSDP2, by owners": {"mesh": {"dp": 2}, "parallelize": partial(shard, together=by_owners)},
        "FSDP2 on 4, by owners": {"mesh": {"dp": 4}, "parallelize": partial(shard, together=by_owners)},
        "each shard by itself (DeepSpeed #8437)": {
            "mesh": {"dp": 2},
            "parallelize": partial(shard, together=each),
            "expected": "diverged",
        },
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
