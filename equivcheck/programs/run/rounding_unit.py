"""Measures how coarsely one device rounds in an operation. From integers torch computes in float32, whatever it returns.

`TorchDispatchMode` is in a private module; tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RoundingUnit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this context, record the coarsest floating-point dtype among all operations' results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = 0.0
        """Distance from 1 to the next larger number in that dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and record the dtypes it returns."""
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.unit = max(self.unit, torch.finfo(each.dtype).eps)
        return found
