"""Programs for ranks, in their own module because processes import them by name."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def rank_and_sum() -> tuple[int, int]:
    """This rank and the sum over all ranks."""
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    return dist.get_rank(), sum(gathered)


def lies_on_its_mesh(rows: int) -> bool:
    """Whether a tensor computed on a rank's own mesh has that mesh, including its groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    found = _added(rows, mesh)
    return found.device_mesh.get_group() is mesh.get_group() and tuple(found.full_tensor().shape) == (2 * rows, 3)


def added_on_even_ranks(rows: int) -> None:
    """Run an operation only on even ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    if dist.get_rank() % 2 == 0:
        _added(rows, mesh)


def _added(rows: int, mesh: DeviceMesh) -> DTensor:
    found: DTensor = DTensor.from_local(torch.ones(rows, 3, dtype=torch.float64), mesh, [Shard(0)], run_check=False) + 1
    return found
