"""`FullyShardedDataParallel` that shards nothing misses frozen parameters of its outermost unit in the state dict, and raises.

After a backward pass the outermost unit is not set back to its parameters where none of them is trained: NO_SHARD takes the data
of its flat parameter, which never moves, for a sign that this has been done.

    torchrun --standalone --nproc-per-node 1 fsdp1_frozen_root_state_dict.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main() -> int:
    """Train a linear after a frozen embedding, and ask for the state dict."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True, "device_id": torch.device("cpu")}
    embedding = nn.Embedding(4, 2)
    embedding.requires_grad_(False)
    linear = FullyShardedDataParallel(nn.Linear(2, 2), **options)
    model = FullyShardedDataParallel(nn.Sequential(embedding, linear), **options)
    model(torch.tensor([1, 2])).sum().backward()
    try:
        print("saved", sorted(model.state_dict()))
        raised = False
    except AssertionError as error:
        print("raised", str(error)[:100])
        raised = True
    dist.destroy_process_group()
    return int(raised)


if __name__ == "__main__":
    sys.exit(main())
