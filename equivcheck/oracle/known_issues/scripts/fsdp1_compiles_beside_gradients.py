"""With `use_orig_params`, a parameter has its full size in forward and its gradient has the size of a shard. Dynamo puts the
two together, for example at a second batch size.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Layer(nn.Module):
    """User-defined linear. Dynamo does not trace torch's own layers below the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2) to the linear's output."""
        return self.linear(inputs)


def main() -> None:
    """Accumulate the gradients from two microbatches, the second larger than the first."""
    model = FullyShardedDataParallel(Layer(), device_id=torch.device("cpu"), use_orig_params=True)
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (2, 4):
        compiled(torch.ones(rows, 2)).sum().backward()
        print("gradients of a microbatch of", rows)
