"""With one seed on all ranks, initialising a `Shard(0)` tensor in place draws the same numbers on every rank, and so does its
dropout mask. With different seeds, dropout of a `Replicate` tensor differs between ranks. On accelerators, DTensor tracks
the generator's offset, which prevents both.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, ones, zeros
from torch.nn.functional import dropout


def on_rank_0(values: torch.Tensor) -> torch.Tensor:
    """Return rank 0's values of a tensor, on every rank."""
    values = values.clone()
    dist.broadcast(values, src=0)
    return values


def main() -> float:
    """Draw random numbers for sharded and for replicated DTensors, and compare them between ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    torch.manual_seed(0)
    shard = torch.nn.init.uniform_(zeros(100 * size, device_mesh=mesh, placements=[Shard(0)])).to_local()
    mask = dropout(ones(100 * size, device_mesh=mesh, placements=[Shard(0)])).to_local()
    shards_agree = rank > 0 and bool((shard == on_rank_0(shard)).all() and (mask == on_rank_0(mask)).all())
    if rank == 0:
        on_rank_0(shard), on_rank_0(mask)

    torch.manual_seed(rank)
    replica = dropout(DTensor.from_local(torch.ones(100), mesh, [Replicate()], run_check=False)).to_local()
    difference = float((replica - on_rank_0(replica)).abs().max())

    if rank == 1:
        print("shards of one random tensor are identical:", shards_agree)
        print("largest difference between replicas of one dropped-out tensor:", difference)
    return max(difference, float(shards_agree))
