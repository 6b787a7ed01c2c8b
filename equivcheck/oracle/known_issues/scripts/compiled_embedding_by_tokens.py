"""Compiling an embedding that `RowwiseParallel` shards by tokens raises under FSDP1, as its mask is no fake tensor.

The lookup and the sum of what ranks have looked up are compiled apart. `_MaskPartial` carries the mask from one to the other,
where Dynamo does not see it.

    torchrun --standalone --nproc-per-node 2 compiled_embedding_by_tokens.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> int:
    """Look tokens up, with and without a compiler."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Embedding(4, 2)), mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    tokens = torch.tensor([[0, 0, 0], [0, 1, 1]])
    print("looked up values of shape", unit(tokens).shape)
    failed = 0
    try:
        torch.compile(unit, backend="aot_eager")(tokens)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
