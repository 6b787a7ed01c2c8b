"""They walk through the memory of parameter and gradient in the same order. If the parameter is stored by rows and the
gradient by columns, each element is updated by the gradient of another. Other implementations are right.
https://github.com/pytorch/pytorch/issues/106951 tells how strides come to differ.
"""

import torch

OPTIMIZERS = {"SGD": {}, "Adam": {"eps": 1.0}, "AdamW": {"eps": 1.0}, "Adagrad": {"eps": 1.0}}


def updated(name: str, gradient: torch.Tensor, **options: object) -> torch.Tensor:
    """Return a zero matrix after one step with the optimizer `name`."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient, memory_format=torch.contiguous_format))
    parameter.grad = gradient
    getattr(torch.optim, name)([parameter], lr=0.1, **OPTIMIZERS[name], **options).step()
    return parameter.detach()


def main() -> float:
    """Take one step with a gradient stored by columns, fused and not fused."""
    gradient = torch.arange(12.0, dtype=torch.float64).view(4, 3).t().contiguous().t()
    errors = {name: float((updated(name, gradient, fused=True) - updated(name, gradient)).abs().max()) for name in OPTIMIZERS}
    for name, error in errors.items():
        print(f"fused update of {name}: {error:.2e}")
    return max(errors.values())
