"""It divides the number of rows by the number of columns. AdamW skips such a parameter. A frozen matrix that
`local_tensors_unfreeze` makes trainable can have no columns.
"""

import torch
from torch import nn
from torch.optim import AdamW, Muon


def main() -> None:
    """Take one Muon step with an empty matrix."""
    parameter = nn.Parameter(torch.empty(2, 0))
    parameter.grad = torch.empty(2, 0)
    for kind in (AdamW, Muon):
        kind([parameter]).step()
        print(kind.__name__, "updates nothing")
