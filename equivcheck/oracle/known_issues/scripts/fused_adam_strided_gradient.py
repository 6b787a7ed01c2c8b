"""The kernel walks through the memory of parameter and gradient in the same order. A transposed gradient is legal and right in
the other implementations; DTensor leaves such gradients after a redistribution.
"""

import torch


def step(gradient: torch.Tensor, *, fused: bool) -> torch.Tensor:
    """Return the parameter after one Adam step from zero."""
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    parameter.grad = gradient
    torch.optim.Adam([parameter], lr=0.1, fused=fused).step()
    return parameter.detach()


def main() -> float:
    """Compare the fused step with the default one, for the same gradient."""
    gradient = torch.arange(-3.0, 3.0).reshape(2, 3).t()
    ordinary, fused = step(gradient, fused=False), step(gradient, fused=True)

    difference = float((ordinary - fused).abs().max())
    print("ordinary:", ordinary.tolist())
    print("fused:   ", fused.tolist())
    return difference
