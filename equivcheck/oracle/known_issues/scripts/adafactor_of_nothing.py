"""`Adafactor` raises for a parameter without elements, as a rank's shard of a short one is.

It divides by the number of elements. AdamW and others leave such a parameter as it is.

    torchrun --standalone --nproc-per-node 1 adafactor_of_nothing.py

Exit code 1 when it raises. Seen on torch 2.13, CPU.
"""

import sys

import torch
from torch import nn
from torch.optim import Adafactor, AdamW


def main() -> int:
    """Update nothing."""
    parameter = nn.Parameter(torch.empty(0, 1))
    parameter.grad = torch.empty(0, 1)
    for kind in (AdamW, Adafactor):
        kind([parameter]).step()
        print(kind.__name__, "updates nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
