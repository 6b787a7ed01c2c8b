"""`set_state_dict` puts the compiler's prefix back before each parameter name, except for the second name of a shared weight
in a flat parameter. Loading then raises ``Missing key(s) in state_dict: "_orig_mod.1.weight"``. `get_state_dict` works.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    """Load the state that the same model has saved: two linears with one weight."""
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    layers[1].weight = layers[0].weight
    model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=False)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    model_state, optimizer_state = get_state_dict(compiled, optimizer)
    set_state_dict(compiled, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
