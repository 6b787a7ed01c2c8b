"""A traced gradient of `mse_loss` has other strides than the real one, so that a graph may take a view that does not exist.

`mse_loss_backward` of fake tensors gives strides as those of its input, that of real ones a contiguous tensor. Where the input is
a transposed batch of sequences, tracing `linear` backward takes a view of the gradient that the graph then cannot take.

    torchrun --standalone --nproc-per-node 1 traced_mse_loss_strides.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU.
"""

import sys

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx


def gradient(weight: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """That of the weight, of rows along dim 1."""
    leaf = weight.detach().requires_grad_()
    nn.functional.mse_loss(nn.functional.linear(inputs, leaf).transpose(0, 1), targets).backward()
    assert leaf.grad is not None
    return leaf.grad


def main() -> int:
    """Run the graph on the tensors that it was traced with."""
    tensors = torch.ones(1, 1), torch.ones(2, 3, 1), torch.zeros(3, 2, 1)
    print("eager:", gradient(*tensors))
    graph = make_fx(gradient, tracing_mode="fake")(*tensors)
    try:
        print("traced:", graph(*tensors))
    except RuntimeError as error:
        print("RuntimeError:", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
