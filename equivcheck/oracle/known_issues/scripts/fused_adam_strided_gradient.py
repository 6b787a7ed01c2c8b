"""Fused Adam on CPU updates the wrong elements when a gradient is not laid out in memory as its parameter is.

The kernel walks through the memory of both. A transposed gradient is legal, and right under the other implementations; DTensor
leaves such gradients after a redistribution. Fused AdamW does the same.

    torchrun --standalone --nproc-per-node 1 fused_adam_strided_gradient.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU. No distributed part is needed.
"""

import sys

import torch


def step(gradient: torch.Tensor, *, fused: bool) -> torch.Tensor:
    """The parameter after one step from zero."""
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    parameter.grad = gradient
    torch.optim.Adam([parameter], lr=0.1, fused=fused).step()
    return parameter.detach()


def main() -> int:
    """Compare the fused step with the ordinary one, for the same gradient."""
    gradient = torch.arange(-3.0, 3.0).reshape(2, 3).t()
    ordinary, fused = step(gradient, fused=False), step(gradient, fused=True)

    difference = float((ordinary - fused).abs().max())
    print("ordinary:", ordinary.tolist())
    print("fused:   ", fused.tolist())
    print("max difference", difference)
    return int(difference > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
