"""DDP broadcasts the module's state from one flat buffer for each dtype. If a dtype has one tensor, and torch calls this tensor
contiguous, the buffer is a view of it. The copy back is then refused if the strides differ, as in some columns of a weight with
one row. A second tensor of the dtype, such as a bias, or a weight from `clone(memory_format=torch.contiguous_format)` avoids it.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Wrap the first half of a weight's columns in DDP, with a bias and without."""
    columns = torch.ones(1, 4).chunk(2, dim=1)[0].clone()
    print("shape", tuple(columns.shape), "stride", columns.stride(), "contiguous:", columns.is_contiguous())
    for bias in (True, False):
        linear = nn.Linear(2, 1, bias=bias)
        linear.weight = nn.Parameter(columns.clone())
        DistributedDataParallel(linear)
        print("bias:", bias)
