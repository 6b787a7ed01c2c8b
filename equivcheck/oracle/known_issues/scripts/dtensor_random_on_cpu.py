"""On a CPU mesh, random DTensors follow each rank's own generator: shards come out identical and replicas different.

With the same seed everywhere, an in-place initialisation of a tensor that is `Shard(0)` draws the same numbers on every rank, and
dropout of a tensor that is `Shard(0)` the same mask. With different seeds, dropout of a `Replicate` tensor differs between ranks.
On accelerators a tracker of the generator's offset prevents both; related to https://github.com/pytorch/pytorch/issues/168058.

    torchrun --standalone --nproc-per-node 2 dtensor_random_on_cpu.py

Exit code 1 when one of them shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, ones, zeros
from torch.nn.functional import dropout


def on_rank_0(values: torch.Tensor) -> torch.Tensor:
    """The same tensor as rank 0 has it."""
    values = values.clone()
    dist.broadcast(values, src=0)
    return values


def main() -> int:
    """Draw in both placements and compare what ranks hold."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
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
        print("replicas of one dropped-out tensor: max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(shards_agree or difference > 0)


if __name__ == "__main__":
    sys.exit(main())
