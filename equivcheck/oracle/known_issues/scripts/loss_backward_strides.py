"""The gradient of these losses is contiguous, but tracing on fake tensors gives it the strides of the outputs. The backward of
flatten then takes a view although it needs a copy.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import mse_loss


def gradient(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss on values that are flattened, viewed in their original shape, and transposed."""
    values = values.detach().requires_grad_()
    loss = mse_loss(values.flatten().view(values.shape).T, target)
    return torch.autograd.grad(loss, values)[0]


def main() -> None:
    """Run the traced gradient function on the inputs that it was traced with."""
    values, target = torch.ones(2, 3), torch.zeros(3, 2)
    gradient(values, target)
    make_fx(gradient, tracing_mode="fake")(values, target)(values, target)
