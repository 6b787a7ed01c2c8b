"""Reads values returned by a user's step, and state outside the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from equivcheck.layouts.base.local_tensors import local_tensor_piece
from equivcheck.training.read import snapshot
from equivcheck.user.batches import as_real
from equivcheck.user.traces.names import WRAPPED
from equivcheck.worlds.trace.trace import Slot, Snapshot, Step

NOTHING = Snapshot(pieces=(), present=(), fits=(), dtypes=(), values=np.empty(0))


def named_tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return all numbers and tensors in nested dicts, lists and state dicts, by dotted path. Each path begins with `name`.

    Other values are left out. Names of wrappers are dropped, because on ranks a model may have more wrappers than on one device.
    """
    if isinstance(value, torch.Tensor):
        return {name: value.detach()}
    if isinstance(value, (int, float)):
        return {name: torch.tensor(float(value), dtype=torch.float64)}
    if callable(getattr(value, "state_dict", None)):
        value = value.state_dict()
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, part in value.items():
        path = ".".join(each for each in [*name.split("."), *str(key).split(".")] if each and each not in WRAPPED)
        for inner, tensor in named_tensors(part, path).items():
            found[inner if inner not in found else f"{inner}.{len(found)}"] = tensor
    return found


def reported_snapshot(values: Mapping[str, torch.Tensor]) -> Snapshot:
    """Copy reported values in float64, because a count may be an integer on one device and a mean on ranks."""
    tensors = [value if isinstance(value, DTensor) else as_real(value).double() for value in values.values()]
    slots = [
        Slot(parameter=tensor, pieces=(local_tensor_piece(name, tensor),)) for name, tensor in zip(values, tensors, strict=True)
    ]
    found = snapshot(slots, tuple(slot.pieces[0] for slot in slots), tensors)
    return replace(found, dtypes=("float64",) * len(slots), values=found.values.astype(np.float64, copy=False))


def with_reports_at_all_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps, with an empty snapshot of reported values in each step that reported none.

    All runs then have the same number of compared points.
    """
    return tuple(step if step.reported else replace(step, reported=NOTHING) for step in steps)
