"""Autocast where equivcheck itself calls the model and the loss: on one device and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equivcheck.scenario import LowPrecision


def autocast(function: Callable[..., Any], kind: LowPrecision) -> Any:
    """The same, called under `torch.autocast`."""
    dtype: torch.dtype = getattr(torch, kind.value)

    def called(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return function(*arguments, **keywords)

    return called
