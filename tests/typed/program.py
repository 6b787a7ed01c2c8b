"""What is judged: trainings by explicit collectives, and each with a small change of its code."""

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
"""Of a rank: ``(model, batch, optimizer, *groups)``, a group for each axis of the mesh, returns the loss."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the code of a right step."""

    about: str
    """What it does, in words."""
    edits: tuple[tuple[str, str], ...]
    """Code that goes, wherever it stands, and what stands there instead."""
    is_wrong: bool
    """Whether ranks no longer compute what one device computes."""


def wrong(about: str, *edits: tuple[str, str]) -> Change:
    """After it, ranks train something else."""
    return Change(about, edits, True)


def harmless(about: str, *edits: tuple[str, str]) -> Change:
    """After it, ranks train the same."""
    return Change(about, edits, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training that is right, and changes of it."""

    name: str
    """In a few words."""
    step: Step
    """Of a rank."""
    model: Callable[[], nn.Module]
    """On one device; ranks have parts of it."""
    batches: tuple[Any, ...]
    """Whole."""
    loss: Callable[[Any, Any], torch.Tensor]
    """On one device."""
    mesh: Mapping[str, int]
    """Sizes of axes."""
    replicated: Mapping[str, Any]
    """By axis, the type of parameters that all ranks have: I, or R where each rank has an addend of the gradient."""
    cuts: Mapping[str, tuple[tuple[int, str], ...]]
    """How other parameters lie: as `check_training` has it."""
    data_axes: tuple[str, ...] = ()
    """Axes over which rows are split."""
    alone: Any = None
    """The step of one device, where it is not the plain one."""
    changes: tuple[Change, ...]
    """Each alone."""

    def changed(self, change: Change | None) -> Step:
        """The step with a change. Raises `ValueError` where the code that goes is not there."""
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
        """Leave a rank its parts, and the groups that its step asks for."""
        for name, parameter in list(model.named_parameters()):
            part = parameter.detach()
            for dim, axis in self.lie(name):
                part = part.chunk(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(part.clone()))
        model.groups = tuple(mesh.get_group(axis) for axis in self.mesh)
        return model

    def lie(self, name: str) -> tuple[tuple[int, str], ...]:
        """Along which dims and axes a parameter is cut."""
        return next((cuts for pattern, cuts in self.cuts.items() if fnmatch(name, pattern)), ())
