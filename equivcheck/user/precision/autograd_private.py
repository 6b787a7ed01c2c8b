"""Access to torch's autograd engine, through private API; tried on torch 2.9 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode


def when_backward_ends(action: Callable[[], None]) -> None:
    """Call `action` at the end of the current backward pass."""
    Variable._execution_engine.queue_callback(action)


def in_backward() -> bool:
    """Whether this thread is currently running a backward pass."""
    return torch._C._current_graph_task_id() != -1  # -1 outside of backward


def run_backward(  # noqa: PLR0913, PLR0917 - those of `Tensor.backward`, behind the mode
    mode: TorchFunctionMode,
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    """Run `Tensor.backward` so that `mode` also sees calls during backward, such as recomputation by activation checkpointing."""
    gradients = (torch.ones_like(tensor) if gradient is None else gradient,)
    leaves = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
    keeps = create_graph if retain_graph is None else retain_graph
    # A mode is off inside its own handler. `Tensor.backward` under the mode would recurse, so the engine is called directly.
    with mode:
        Variable._execution_engine.run_backward(
            (tensor,), gradients, keeps, create_graph, leaves, allow_unreachable=True, accumulate_grad=True
        )
