"""Replace a module's parameters or their gradients on the way to its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn import functional

TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def use_through(module: nn.Module, through: TensorFunction) -> None:
    """Apply a function to all parameters of a linear, norm or embedding layer in each forward."""
    module.forward = _forward(module, through)


def _forward(module: nn.Module, through: TensorFunction) -> Callable[[torch.Tensor], torch.Tensor]:
    def used(name: str) -> torch.Tensor | None:
        parameter = getattr(module, name, None)
        return None if parameter is None else through(parameter)

    def linear(inputs: torch.Tensor) -> torch.Tensor:
        weight = used("weight")
        assert weight is not None, "a linear has a weight"
        return functional.linear(inputs, weight, used("bias"))

    if isinstance(module, nn.Linear):
        return linear
    if isinstance(module, nn.LayerNorm):
        return lambda inputs: functional.layer_norm(inputs, module.normalized_shape, used("weight"), used("bias"), module.eps)
    if isinstance(module, nn.Embedding):
        return lambda tokens: functional.embedding(tokens, through(module.weight), module.padding_idx)
    assert isinstance(module, nn.RMSNorm), module
    return lambda inputs: functional.rms_norm(inputs, module.normalized_shape, used("weight"), module.eps)


def use_weight_through(linear: nn.Module, through: TensorFunction) -> None:
    """Apply a function to a linear layer's weight, but not to its bias."""
    use_through(linear, lambda parameter: through(parameter) if parameter.ndim > 1 else parameter)


class FirstValues:
    """Function that replaces a weight by its first values. Gradients still go to the current weight."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a value equal to the weight until its first update."""
        if self.first is None:
            self.first = weight.detach().clone()
        return weight + (self.first - weight).detach()


class _Changed(torch.autograd.Function):
    """Applies one function to a tensor in forward, and another to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: TensorFunction, gradients: TensorFunction) -> torch.Tensor:
        ctx.gradients = gradients
        return values(tensor)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gradients(outputs[0]), None, None


def transform(
    tensor: torch.Tensor, *, values: TensorFunction = torch.Tensor.detach, gradients: TensorFunction = lambda gradient: gradient
) -> torch.Tensor:
    """Change a tensor in forward and the tensor's gradient in backward.

    The function `values` takes the tensor, and the function `gradients` takes the gradient.
    """
    result: torch.Tensor = _Changed.apply(tensor, values, gradients)  # type: ignore[no-untyped-call]
    return result


def change_input_gradient(module: nn.Module, gradients: TensorFunction) -> None:
    """Let the function `gradients` change the gradient of a module's first input in backward."""

    def change(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (transform(inputs[0], gradients=gradients), *inputs[1:])

    module.register_forward_pre_hook(change)


def treat_as_reduced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a partial DTensor marked as replicated, without the reduction that this would need."""
    if not _is_partial(tensor):
        return tensor
    return DTensor.from_local(tensor.to_local(), tensor.device_mesh, _whole(tensor), run_check=False)


def reduce_twice(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce a partial DTensor, then mark the result as partial again, so that it is reduced a second time."""
    if not _is_partial(tensor):
        return tensor
    summed = tensor.redistribute(placements=_whole(tensor)).to_local()
    return DTensor.from_local(summed, tensor.device_mesh, tensor.placements, run_check=False)


def _is_partial(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements)


def _whole(tensor: DTensor) -> list[Placement]:
    """Return the tensor's placements with `Partial` replaced by `Replicate`."""
    return [Replicate() if isinstance(placement, Partial) else placement for placement in tensor.placements]


def keep_partial_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter whose gradient stays partial: backward does not reduce it over ranks."""
    return transform(parameter, gradients=treat_as_reduced)
