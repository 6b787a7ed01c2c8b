"""On CPU, fused updates take a gradient that lies in memory in another order than its parameter for another gradient.

They go through both by memory alone: with a parameter by rows and a gradient by columns, each element is updated by the
gradient of another. Nothing is raised, and other implementations of the same optimizers are right. How strides come to
differ: https://github.com/pytorch/pytorch/issues/106951.

    torchrun --standalone --nproc-per-node 1 fused_updates_by_memory.py

Exit code 1 when it shows.
"""

import sys

import torch

OPTIMIZERS = {"SGD": {}, "Adam": {"eps": 1.0}, "AdamW": {"eps": 1.0}, "Adagrad": {"eps": 1.0}}


def updated(name: str, gradient: torch.Tensor, **options: object) -> torch.Tensor:
    """A matrix of zeros after one step."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient, memory_format=torch.contiguous_format))
    parameter.grad = gradient
    getattr(torch.optim, name)([parameter], lr=0.1, **OPTIMIZERS[name], **options).step()
    return parameter.detach()


def main() -> int:
    """Take one step with a gradient by columns, fused and not."""
    gradient = torch.arange(12.0, dtype=torch.float64).view(4, 3).t().contiguous().t()
    errors = {name: float((updated(name, gradient, fused=True) - updated(name, gradient)).abs().max()) for name in OPTIMIZERS}
    for name, error in errors.items():
        print(f"fused update of {name}: max difference {error:.2e}")
    return int(max(errors.values()) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
