"""Canonical names of parameters and buffers, whatever has been wrapped around a model or put into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WRAPPED = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What wrappers call the module inside."""


class Names:
    """The names that a model gives its tensors, to be found again once the model has been parallelized.

    Submodules are known by what they are, not by where they lie: a wrapper around one takes no part in the names within it.
    A module that is new is named by its place in the known one around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._alive = list(model.modules())  # or another module could come to have the id of one that is gone
        first: dict[int, str] = {}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._first = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def parameters(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Distinct parameters; one that the model shares has the first of its names, unless another parameter has that here."""
        return self._named(module, "named_parameters")

    def buffers(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Distinct buffers."""
        return self._named(module, "named_buffers")

    def modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of the model, or what has taken their place, by their names; not what has been wrapped around them."""
        owners = list(self._owners(module, "", set()))
        there = {path for path, owner in owners if id(owner) in self._paths}
        return [(path, owner) for path, owner in owners if id(owner) in self._paths or path not in there]

    def all_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Distinct modules; wrappers have the name of what is around them."""
        return list(self._owners(module, "", set()))

    def _named(self, module: nn.Module, what: str) -> list[tuple[str, torch.Tensor]]:
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for path, owner in self._owners(module, "", set()):
            for key, tensor in _own(owner, what):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    name = f"{path}.{key}" if path else key
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
    """The tensors of a module that are not its children's, by the plain `nn.Module`: a wrapper's own method may differ."""
    yield from getattr(nn.Module, what)(module, recurse=False)
