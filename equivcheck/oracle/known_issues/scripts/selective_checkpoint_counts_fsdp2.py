"""A selective checkpoint also counts the operations that `fully_shard` dispatches if its unit lies inside the region, such as the
start of a range for the profiler. The recomputation starts `FSDP::root_pre_forward` for a unit that was not the root in forward.
This is one more than is stored, so torch raises.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KEEP_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Block(nn.Module):
    """Linear with an activation. Backward computes both again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, *, is_selective: bool) -> torch.Tensor:
        """Compute the activations. A selective checkpoint keeps the matrix product."""
        options = {"context_fn": KEEP_PRODUCTS} if is_selective else {}
        outputs: torch.Tensor = checkpoint(lambda rows: self.linear(rows).tanh(), inputs, use_reentrant=False, **options)
        return outputs


def main() -> None:
    """Train a block with a `fully_shard` unit inside a checkpoint, and inside a selective one."""
    for is_selective in (False, True):
        block = Block()
        fully_shard(block.linear)
        fully_shard(block)
        block(torch.ones(1, 2), is_selective=is_selective).sum().backward()
        print("selective:", is_selective)
