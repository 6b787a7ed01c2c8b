"""A state dict cannot be loaded into a compiled FSDP1 without ``use_orig_params`` whose modules share a weight.

`set_state_dict` puts the prefix of the compiler back before the names of parameters, but not before one of the two that a shared
weight has in a flat parameter: loading raises ``Missing key(s) in state_dict: "_orig_mod.1.weight"``. `get_state_dict` works.

    torchrun --standalone --nproc-per-node 1 compiled_flat_shared_weight_load.py

Exit code 1 when loading raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> int:
    """Load what was got from the same model: two linears with one weight."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    layers[1].weight = layers[0].weight
    model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=False)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    model_state, optimizer_state = get_state_dict(compiled, optimizer)
    set_state_dict(compiled, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
