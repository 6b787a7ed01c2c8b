"""Finds names for parameters and buffers, independent of wrappers around or inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WRAPPED = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Attribute names under which wrappers keep the wrapped module."""


class TensorNames:
    """Maps tensors in a parallelized model to their names in the original model.

    A submodule is recognized by identity, so wrappers around it do not change the names inside. A new module is named by its path
    inside the nearest known module. If a wrapper refers to a parameter too, the parameter keeps its name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._alive = list(model.modules())  # keeps ids unique: a freed module's id could be reused
        first: dict[int, str] = {}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._first = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def parameters(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return each distinct parameter in `module` with its name.

        A parameter that several modules share in the original model gets its first name there. If another parameter has this name
        already, the path in `module` is used.
        """
        return self._named(module, "named_parameters")

    def buffers(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return each distinct buffer in `module` with its name."""
        return self._named(module, "named_buffers")

    def buffer_owners(self, module: nn.Module) -> list[tuple[str, nn.Module, str]]:
        """Return each distinct buffer's name, with the module and the attribute in which it is."""
        owners = (owner for _, owner in self._owners(module, "", set()))
        places = {id(tensor): (owner, key) for owner in owners for key, tensor in _own(owner, "named_buffers")}
        return [(name, *places[id(tensor)]) for name, tensor in self.buffers(module)]

    def modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the original modules, or their replacements, by name. Wrappers are left out."""
        owners = list(self._owners(module, "", set()))
        there = {path for path, owner in owners if id(owner) in self._paths}
        return [(path, owner) for path, owner in owners if id(owner) in self._paths or path not in there]

    def all_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return all distinct modules by name. A wrapper has the name of the module that it wraps."""
        return list(self._owners(module, "", set()))

    def _named(self, module: nn.Module, what: str) -> list[tuple[str, torch.Tensor]]:
        chosen: dict[int, tuple[int, str, torch.Tensor]] = {}
        for path, owner in self._owners(module, "", set()):
            for key, tensor in _own(owner, what):
                name = f"{path}.{key}" if path else key
                # A wrapper may hold another reference to a parameter, so that names within the original modules go first.
                rank = 0 if id(owner) in self._paths else 1 if name in self._first else 2
                if id(tensor) not in chosen or rank < chosen[id(tensor)][0]:
                    chosen[id(tensor)] = rank, name, tensor
        found: dict[str, torch.Tensor] = {}
        for _, name, tensor in chosen.values():
            canonical = self._first.get(name, name)
            found[name if canonical in found else canonical] = tensor
        return list(found.items())

    def _owners(self, module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        known = id(module) in self._paths
        path = self._paths.get(id(module), path)
        yield path, module
        for key, child in module.named_children():
            within = key if not path else f"{path}.{key}"
            yield from self._owners(child, path if key in WRAPPED and not known else within, seen)


def _own(module: nn.Module, what: str) -> Iterator[tuple[str, Any]]:
    """Direct parameters or buffers. It calls the `nn.Module` method because a wrapper may override it."""
    yield from getattr(nn.Module, what)(module, recurse=False)
