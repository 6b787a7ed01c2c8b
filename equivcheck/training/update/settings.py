"""Optimizer options, such as the learning rate, by parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from equivcheck.worlds.trace.trace import Slot

Settings = Mapping[str, Mapping[str, float]]
"""Numbers in each parameter's group, by parameter name."""

FLAGS = ("amsgrad", "decoupled_weight_decay", "maximize", "nesterov")
"""Optimizer flags that change values. All other flags select an implementation."""


def settings_of(optimizers: Sequence[torch.optim.Optimizer], slots: Sequence[Slot], flags: Collection[str] = ()) -> Settings:
    """Return the numeric optimizer options for each parameter, by name. Parameters in one group share one dict.

    If an optimizer wraps another one, the inner optimizer's options are returned. `flags` names boolean options to include, as
    1 and 0.
    """
    groups = [
        (group["params"], dict(_numbers(group)) | {key: float(group[key]) for key in flags if isinstance(group.get(key), bool)})
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    found = {id(parameter): numbers for parameters, numbers in groups for parameter in parameters}
    return {piece.name: found[id(slot.parameter)] for slot in slots for piece in slot.pieces if id(slot.parameter) in found}


def set_number(group: dict[str, Any], key: str, value: float) -> None:
    """Set an option in an optimizer's parameter group. `key` comes from `settings_of`, such as ``lr`` or ``betas[1]``.

    If the group does not have the option, nothing is set.
    """
    name, _, index = key.rstrip("]").partition("[")
    if name not in group:
        return
    if index:
        numbers = list(group[name])
        numbers[int(index)] = value
        group[name] = type(group[name])(numbers)
    else:
        group[name] = bool(value) if isinstance(group[name], bool) else value


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a parameter group, also inside tuples. Flags are skipped because they select an implementation."""
    for key, value in group.items():
        if key != "params":
            several = isinstance(value, (tuple, list))
            for index, one in enumerate(value if several else [value]):
                if is_number(one):
                    yield (f"{key}[{index}]" if several else key), float(one)


def is_number(value: Any) -> bool:
    """Whether an option's value is a number, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
