"""`set_state_dict` strips the compiler's prefix from each parameter name and expects one name per parameter. Without
`use_orig_params`, a flat parameter has several. `get_state_dict` works.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    """Load the state that the same model has saved: weight and bias for one linear."""
    model = FullyShardedDataParallel(nn.Linear(1, 2), device_id=torch.device("cpu"), use_orig_params=False)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    model_state, optimizer_state = get_state_dict(compiled, optimizer)
    set_state_dict(compiled, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
