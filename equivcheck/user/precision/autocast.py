"""`torch.autocast` around model and loss, for trainings that use the built-in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equivcheck.scenario import LowPrecision


def autocast(function: Callable[..., Any], kind: LowPrecision) -> Any:
    """Wrap a function so that it runs under `torch.autocast`."""
    dtype: torch.dtype = getattr(torch, kind.value)

    def called(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return function(*arguments, **keywords)

    return called
