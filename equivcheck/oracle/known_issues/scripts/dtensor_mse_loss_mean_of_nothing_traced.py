"""The traced backward divides by the number of elements in Python."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import mse_loss


def gradient(values: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `mse_loss` against zeros."""
    values = values.detach().requires_grad_()
    return torch.autograd.grad(mse_loss(values, torch.zeros_like(values)), values)[0]


def main() -> None:
    """Compute the gradient in eager mode, then trace it on fake tensors."""
    gradient(torch.empty(0))
    make_fx(gradient, tracing_mode="fake")(torch.empty(0))
