"""`Muon` raises for a matrix without columns, as a rank's shard of a short one is.

It divides the number of rows by that of columns. AdamW leaves such a parameter as it is.

    torchrun --standalone --nproc-per-node 1 muon_of_no_columns.py

Exit code 1 when it raises. Seen on torch 2.9 to 2.15, CPU.
"""

import sys

import torch
from torch import nn
from torch.optim import AdamW, Muon


def main() -> int:
    """Update nothing."""
    parameter = nn.Parameter(torch.empty(2, 0))
    parameter.grad = torch.empty(2, 0)
    for kind in (AdamW, Muon):
        kind([parameter]).step()
        print(kind.__name__, "updates nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
