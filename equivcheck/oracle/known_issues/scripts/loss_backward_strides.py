"""A traced backward of `mse_loss`, `huber_loss` or `smooth_l1_loss` of transposed values fails where the eager one works.

The gradient that these losses leave is contiguous, but the one that tracing works out on fake tensors is laid out as the values
are. What autograd records after it, here the backward of flatten, is a view of the one and no view of the other.

    torchrun --standalone --nproc-per-node 1 loss_backward_strides.py

Exit code 1 when it raises. Seen on torch 2.13, CPU. No distributed part is needed.
"""

import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import mse_loss


def gradient(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """That of a loss of the values, flattened, viewed as they were, and transposed."""
    values = values.detach().requires_grad_()
    loss = mse_loss(values.flatten().view(values.shape).T, target)
    return torch.autograd.grad(loss, values)[0]


def main() -> int:
    """Run the gradient's graph on what it was traced for."""
    values, target = torch.ones(2, 3), torch.zeros(3, 2)
    gradient(values, target)
    make_fx(gradient, tracing_mode="fake")(values, target)(values, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
