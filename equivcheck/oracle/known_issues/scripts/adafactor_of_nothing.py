"""It divides by the number of elements. AdamW and other optimizers skip such a parameter."""

import torch
from torch import nn
from torch.optim import Adafactor, AdamW


def main() -> None:
    """Take one Adafactor step with an empty parameter."""
    parameter = nn.Parameter(torch.empty(0, 1))
    parameter.grad = torch.empty(0, 1)
    for kind in (AdamW, Adafactor):
        kind([parameter]).step()
        print(kind.__name__, "updates nothing")
