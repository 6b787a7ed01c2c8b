"""Finds out from which module tensors and parameters a tensor is computed, in the single-device run's autograd graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equivcheck.user.diagnosis.place.modules import Key, ModuleTensor

_Sources = tuple[frozenset[Key], frozenset[str]]
_NONE: _Sources = (frozenset(), frozenset())


class Dependencies:
    """Dependencies between the inputs and outputs of modules in one step: which earlier tensors each tensor is computed from."""

    def __init__(self, seen: Sequence[ModuleTensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """`seen` lists recorded tensors in execution order, with their autograd nodes. `parameters` are the model's, by name."""
        own = [each for each in seen if not each.key.is_gradient]
        self._order = {each.key: number for number, each in enumerate(own)}
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        at_node: dict[Any, set[Key]] = {}
        for each in own:
            if each.node is not None:
                at_node.setdefault(each.node, set()).add(each.key)
        self._reached: dict[Any, _Sources] = {}
        for each in own:
            self._reach(each.node, at_node)
        self._sources: dict[Key, _Sources] = {each.key: self._reached[each.node] for each in own if each.node is not None}

    def is_computed_from(self, key: Key, source: Key) -> bool:
        """Whether a module tensor is computed from an earlier one, `source`.

        If either tensor has no autograd node, the order of execution decides.
        """
        later, earlier = key._replace(is_gradient=False), source._replace(is_gradient=False)
        if self._order[later] <= self._order[earlier]:
            return False
        known = later in self._sources and earlier in self._sources
        return earlier in self._sources[later][0] if known else True

    def nearest_parameters(self, key: Key) -> frozenset[str]:
        """Return the names of the parameters used to compute a module tensor from the module tensors recorded before it.

        If no parameter is used, the same is tried for the earlier tensors, from the latest to the first.
        """
        tensor = key._replace(is_gradient=False)
        before = sorted(self._sources.get(tensor, _NONE)[0], key=self._order.__getitem__, reverse=True)
        for each in (tensor, *before):
            tensors, names = self._sources.get(each, _NONE)
            others = [self._sources[other][1] for other in tensors if other != each and self._order[other] < self._order[each]]
            nearest = names.difference(*others)
            if nearest:
                return nearest
        return frozenset()

    def _reach(self, start: Any, at_node: Mapping[Any, set[Key]]) -> None:
        """Find the sources of a node and of all nodes before it, in a loop: graphs may be deeper than Python's stack."""
        waiting = [start]
        while waiting:
            node = waiting[-1]
            if node is None or node in self._reached:
                waiting.pop()
                continue
            before = [each for each, _ in node.next_functions if each is not None]
            missing = [each for each in before if each not in self._reached]
            if missing:
                waiting += missing
                continue
            variable = getattr(node, "variable", None)
            name = self._names.get(id(variable)) if variable is not None else None
            tensors, names = frozenset(at_node.get(node, ())), frozenset(() if name is None else (name,))
            found = [self._reached[each] for each in before]
            self._reached[node] = tensors.union(*(one for one, _ in found)), names.union(*(two for _, two in found))
            waiting.pop()
