"""Finds the trained models of a process, with their parameters' names and positions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from weakref import WeakSet

import torch
from torch import nn

from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.tensors import Row, buffers_of, find_root, modules_of, slots_of
from equivcheck.worlds.trace.trace import Slot


class Models:
    """The modules that own the trained parameters.

    If two modules have parameters with the same names, the later module's names get a prefix, such as ``module1.``.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.roots: list[nn.Module] = []
        self.slots: tuple[Slot, ...] = ()
        self.module_names: dict[int, str] = {}
        """Names of the modules inside, by id."""
        self._prefixed: list[tuple[nn.Module, str]] = []
        self._called = WeakSet[nn.Module]()

    def add_called(self, module: nn.Module) -> list[Slot]:
        """Find the parameters of a module that the script has called to train it.

        Returns a slot (parameter with its position) for each new parameter.
        """
        if module in self._called:
            return []
        self._called.add(module)
        known = {id(slot.parameter) for slot in self.slots}
        new = [each for each in module.parameters() if each.requires_grad and id(each) not in known]
        if new:
            # A script that calls parts of its model one after another, and not the model, has one owner for all of them.
            owner = find_root([*(slot.parameter for slot in self.slots), *new]) if self.roots else None
            self._add_root(owner or module)
        return [slot for slot in self.slots if id(slot.parameter) not in known]

    def add_optimized(self, parameters: Collection[torch.Tensor]) -> list[Slot]:
        """Find the module that owns an optimizer's `parameters`, and return slots for the new ones.

        If no module owns them, they must be copies of the models' parameters, and slots for the copies are returned. Raises
        `UsageError` if a tensor is a copy of no parameter.
        """
        known = {id(slot.parameter) for slot in self.trained_slots}
        unknown = [parameter for parameter in parameters if id(parameter) not in known]
        if not unknown:
            return []
        if (owner := find_root(parameters)) is None:
            return list(self._adapter.adopt_copies(unknown, self.slots))
        self._add_root(owner)
        return [slot for slot in self.slots if id(slot.parameter) not in known]

    def _add_root(self, root: nn.Module) -> None:
        """Add a root module.

        It replaces roots inside it, and roots whose parameters it owns, as a model owns those of its stages.
        """
        inside, owned = set(map(id, root.modules())), set(map(id, root.parameters()))
        others = [each for each in self.roots if id(each) not in inside and not owned >= set(map(id, each.parameters()))]
        self.roots = [*others, root]
        self._prefixed = list(_with_prefixes(self.roots))
        self.slots = tuple(chain.from_iterable(slots_of(each, prefix) for each, prefix in self._prefixed))
        self.module_names = {}
        for each, prefix in self._prefixed:
            self.module_names |= modules_of(each, prefix)
        self._adapter.learn(self.roots, self.slots, self.buffers())

    @property
    def trained_slots(self) -> tuple[Slot, ...]:
        """Slots for all parameters, and for an optimizer's copies of parameters."""
        return (*self.slots, *self._adapter.copies)

    def slots_for(self, parameters: Iterable[torch.Tensor]) -> list[Slot]:
        """Return the slots for `parameters`, which may also be an optimizer's copies. Unknown tensors are left out."""
        wanted = set(map(id, parameters))
        return [slot for slot in self.trained_slots if id(slot.parameter) in wanted]

    def new_names(self, before: Sequence[Slot]) -> Mapping[str, str]:
        """Map the names in the slots `before` to the present names. Names change if a new root module contains the old one."""
        now = {id(slot.parameter): slot.pieces for slot in self.slots}
        return {
            old.name: new.name for slot in before for old, new in zip(slot.pieces, now.get(id(slot.parameter), ()), strict=False)
        }

    def parameters(self) -> list[Row]:
        """Return all parameters and an optimizer's copies of them, with their positions."""
        return [(slot.pieces, slot.parameter) for slot in self.trained_slots]

    def buffers(self) -> list[Row]:
        """Return all buffers of the models, with their positions."""
        return [row for root, prefix in self._prefixed for row in buffers_of(root, prefix)]


def _with_prefixes(roots: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    taken: set[str] = set()
    for number, root in enumerate(roots):
        names = {piece.name for slot in slots_of(root) for piece in slot.pieces if piece.name}
        yield root, f"module{number}." if names & taken else ""
        taken |= names
