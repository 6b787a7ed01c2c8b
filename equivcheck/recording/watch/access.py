"""Reads a training's tensors without disturbing the training.

Private torch API, tried on torch 2.9, 2.13 and 2.15, because none is public: `_disable_current_modes` and `DisableTorchFunction`
turn the training's modes off, and `peek_interpreter_stack` shows that a `torch.func` transform runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


def has_values() -> bool:
    """Whether tensors have values that can be read now.

    They have none while torch compiles or traces, inside `torch.func` transforms, or while a CUDA graph is captured.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


@contextlib.contextmanager
def leave_no_mark() -> Iterator[None]:
    """Inside this context, operations track no gradients.

    The training's own dispatch modes, such as an operation counter, do not see these operations.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
