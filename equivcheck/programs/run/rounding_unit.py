"""How coarsely one device rounds within an operation: from integers torch computes in float32, whatever it then returns.

`TorchDispatchMode` is torch's own and has an underscore in its path; tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RoundingUnit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes the coarsest dtype of what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = 0.0
        """Its unit in the last place, of 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and look at what it returns."""
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.unit = max(self.unit, torch.finfo(each.dtype).eps)
        return found
