"""Optimizer state cannot be loaded into a compiled FSDP1 without ``use_orig_params`` whose flat parameters are of several.

To leave out the compiler's prefix from names, `set_state_dict` goes through those of all parameters, and takes each to be of one:
a flat parameter has the names of all that are in it. `get_state_dict` of the same model works.

    torchrun --standalone --nproc-per-node 1 compiled_flat_parameters_load.py

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
    """Load what was got from the same model: the weight and the bias of a linear."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = FullyShardedDataParallel(nn.Linear(1, 2), device_id=torch.device("cpu"), use_orig_params=False)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    model_state, optimizer_state = get_state_dict(compiled, optimizer)
    set_state_dict(compiled, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
