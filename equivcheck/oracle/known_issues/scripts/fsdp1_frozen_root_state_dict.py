"""After backward, the root unit is not reset to its original parameters, because NO_SHARD takes the unmoved flat parameter for
a sign that the reset is done.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main() -> None:
    """Train a linear after a frozen embedding, and get the state dict."""
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True, "device_id": torch.device("cpu")}
    embedding = nn.Embedding(4, 2)
    embedding.requires_grad_(False)
    linear = FullyShardedDataParallel(nn.Linear(2, 2), **options)
    model = FullyShardedDataParallel(nn.Sequential(embedding, linear), **options)
    model(torch.tensor([1, 2])).sum().backward()
    print("saved", sorted(model.state_dict()))
