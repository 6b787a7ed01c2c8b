"""Trainings with explicit collectives, each with small changes to its code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Step = Callable[..., torch.Tensor]
"""Step on a rank: ``(model, batch, optimizer, *groups)`` with a group per mesh axis; returns the loss."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a correct step."""

    about: str
    """Short description."""
    edits: tuple[tuple[str, str], ...]
    """Code to replace everywhere, and its replacement."""
    is_wrong: bool
    """Whether ranks then differ from one device."""


def wrong(about: str, *edits: tuple[str, str]) -> Change:
    """A change after which ranks differ from one device."""
    return Change(about, edits, True)


def harmless(about: str, *edits: tuple[str, str]) -> Change:
    """A change without an effect on the training."""
    return Change(about, edits, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A correct training, and changes to it."""

    name: str
    """Short description."""
    step: Step
    """Step on ranks."""
    model: Callable[[], nn.Module]
    """Single-device model; ranks shard it."""
    batches: tuple[Any, ...]
    """Full batches."""
    loss: Callable[[Any, Any], torch.Tensor]
    """Single-device loss."""
    mesh: Mapping[str, int]
    """Axis sizes."""
    replicated: Mapping[str, Any]
    """Type of replicated parameters by axis: I, or R if their gradients are partial."""
    cuts: Mapping[str, tuple[tuple[int, str], ...]]
    """Sharding of other parameters, as in `check_training`."""
    data_axes: tuple[str, ...] = ()
    """Axes over which rows are split."""
    alone: Any = None
    """Single-device step, if it is not the plain one."""
    changes: tuple[Change, ...]
    """Changes, applied one at a time."""

    def changed(self, change: Change | None) -> Step:
        """Apply a change. Raises `ValueError` if its code is not in the step."""
        if change is None:
            return self.step
        source = inspect.getsource(self.step)
        for old, new in change.edits:
            if old not in source:
                raise ValueError(f"{self.name}: {old!r} is not in\n{source}")
            source = source.replace(old, new)
        namespace = dict(self.step.__globals__)
        exec(compile(source, f"<{self.name}: {change.about}>", "exec"), namespace)
        found: Step = namespace[self.step.__name__]
        return found

    def cut(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard the model, and attach the groups that the step needs."""
        for name, parameter in list(model.named_parameters()):
            part = parameter.detach()
            for dim, axis in self.lie(name):
                part = part.chunk(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(part.clone()))
        model.groups = tuple(mesh.get_group(axis) for axis in self.mesh)
        return model

    def lie(self, name: str) -> tuple[tuple[int, str], ...]:
        """Sharded dims and axes of a parameter."""
        return next((cuts for pattern, cuts in self.cuts.items() if fnmatch(name, pattern)), ())
