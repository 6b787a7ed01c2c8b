"""``mse_loss(..., reduction="mean")`` cannot be traced backward on fake tensors without elements, as a rank without a shard has.

    torchrun --standalone --nproc-per-node 1 dtensor_mse_loss_mean_of_nothing_traced.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU.
"""

import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import mse_loss


def gradient(values: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss."""
    values = values.detach().requires_grad_()
    return torch.autograd.grad(mse_loss(values, torch.zeros_like(values)), values)[0]


def main() -> int:
    """Trace what eager runs."""
    gradient(torch.empty(0))
    try:
        make_fx(gradient, tracing_mode="fake")(torch.empty(0))
    except ZeroDivisionError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
