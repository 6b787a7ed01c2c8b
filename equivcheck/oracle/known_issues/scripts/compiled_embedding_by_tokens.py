"""The lookup and the sum over ranks are compiled separately. `_MaskPartial` carries the mask from one to the other as a real
tensor, which Dynamo does not see and which is not a fake tensor.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> None:
    """Look up tokens with and without `torch.compile`."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Embedding(4, 2)), mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    tokens = torch.tensor([[0, 0, 0], [0, 1, 1]])
    print("looked up values of shape", unit(tokens).shape)
    torch.compile(unit, backend="aot_eager")(tokens)
