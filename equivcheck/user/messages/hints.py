"""Errors and notes about common mistakes in a user's functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from equivcheck.errors import UsageError
from equivcheck.user.usage import invalid

_HINTS = {
    re.compile("(?=.*float(?!64))(?=.*double)", re.IGNORECASE | re.DOTALL): (
        "Your code makes float32 tensors, for example with .float(). Pass keep_dtype=True to replace casts to float32 by "
        "casts to float64, or dtype=torch.float32 to train in float32 with wider tolerances"
    ),
    re.compile("does not require grad and does not have a grad_fn"): (
        "The loss must be computed from the model's outputs, without .detach(), .item() or torch.no_grad()"
    ),
    re.compile("grad can be implicitly created only for scalar outputs"): "The loss must have one element: end it with .mean()",
}
"""Hints for torch's messages."""


class InvalidLoss(UsageError):
    """Backward cannot start from this loss. On one device the user gets this error; on ranks it counts as a failed training."""


def note_on(error: Exception, dtype: torch.dtype | None) -> str:
    """Return a note for an exception in the single-device run, with a hint if the exception's message is known."""
    how = "unchanged" if dtype is None else f"converted to {dtype} (dtype=None leaves them unchanged)"
    hints = [f". {hint}" for pattern, hint in _HINTS.items() if pattern.search(str(error))]
    return f"check_training: raised in the single-device run, with model and batches {how}{''.join(hints)}"


def note_on_outputs(outputs: Any) -> tuple[str, ...]:
    """Return a note for an exception in `loss` that says how to select one of the model's outputs.

    No note if the output is a tensor.
    """
    if isinstance(outputs, torch.Tensor):
        return ()
    key = next(iter(outputs), "logits") if isinstance(outputs, Mapping) else 0
    return (
        f"check_training: your model returned a {type(outputs).__name__}, and `loss` gets it unchanged. Select a tensor in it, "
        f"for example loss=lambda outputs, targets: your_loss(outputs[{key!r}], targets), or pass your own step=",
    )


def invalid_loss(value: Any) -> InvalidLoss | None:
    """Return an error if backward cannot start from this loss; None if it can."""
    if not isinstance(value, torch.Tensor):
        why, expected = (
            f"it returned a value of type {type(value).__name__}",
            "a tensor with one element, without .item() or float()",
        )
    elif value.numel() != 1:
        why, expected = f"it returned a tensor of shape {list(value.shape)}", "one element, such as the mean: .mean()"
    elif not value.requires_grad:
        why = "its result does not depend on a parameter that requires a gradient"
        expected = "a result computed from the model's outputs, without .detach(), .item() or torch.no_grad()"
    else:
        return None
    return InvalidLoss(str(invalid("loss", why, expected)))
