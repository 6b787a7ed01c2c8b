"""Every tensor-parallel rank gets the state of the first one, because the gathered state starts with its shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> float:
    """Save and load the momentum of a column-parallel linear after one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 8, bias=False), mesh["tp"], ColwiseParallel())
    model = FullyShardedDataParallel(linear, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    weights = torch.arange(1.0, 9.0).chunk(2)[mesh.get_local_rank("tp")]
    (model(torch.ones(1, 1)) * weights).sum().backward()
    optimizer.step()
    (before,) = (state["momentum_buffer"].clone() for state in optimizer.state.values())

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved))
    (after,) = (state["momentum_buffer"] for state in optimizer.state.values())

    print(f"rank {dist.get_rank()} before {before.tolist()} after {after.tolist()}")
    difference = (after - before).abs().max() if after.shape == before.shape else torch.tensor(torch.inf)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return float(difference)
