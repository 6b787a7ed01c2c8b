"""An optimizer's settings, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


def settings_of(optimizer: torch.optim.Optimizer) -> Iterator[Mapping[str, str]]:
    """Yield the settings of each parameter group as text, with the optimizer's class as ``optimizer``.

    A tensor with one element, such as a learning rate on a GPU, is replaced by its value. Other objects are left out.
    """
    for group in optimizer.param_groups:
        values = {name: _value(value) for name, value in group.items() if name != "params"}
        known = {name: repr(value) for name, value in values.items() if _is_plain(value)}
        yield {"optimizer": type(optimizer).__name__} | known


def _value(value: object) -> object:
    own = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return float(own) if isinstance(own, float) else own  # NumPy's numbers have another repr


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)
