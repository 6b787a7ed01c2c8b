"""FSDP units: which parameters `fully_shard` gathers and reduces together, and in which order their forward ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from equivcheck.layouts.base.dtensor_experts import is_dtensor_expert
from equivcheck.layouts.base.expected_calls.rank_view import Held, RankView
from equivcheck.scenario import FSDP2, Layout, Wrapping
from equivcheck.scenario.parallelisms.base import ParameterOwner
from equivcheck.training.layers.token_facts import EMBEDDING


@dataclass(slots=True, kw_only=True)
class Unit:
    """FSDP unit: parameters gathered and reduced together."""

    held: tuple[Held, ...]
    """The unit's parameters on this rank."""
    last_layer: int
    """Index of the layer that computes the unit's output."""
    is_root: bool = False
    """Whether the unit is the root, with all parameters outside other units."""
    is_of_experts: bool = False
    """Whether the unit contains only one layer's DTensor experts. It lies inside the layer's unit."""
    is_head: bool = False
    """Whether the unit has only the head."""
    is_embedding: bool = False
    """Whether the unit has only the token embedding, which backward does not gather (`set_unshard_in_backward(False)`)."""
    group: int = 0
    """Index among the parameter groups of the same modules. Each group is gathered and reduced separately."""
    num_groups: int = 1
    """Number of parameter groups: 2 if `experts_on_all_ranks` gives experts of the modules another mesh."""
    gathered: bool = False
    """Whether this rank currently has the unit's full parameters."""
    resharded: bool = False
    """Whether the unit is currently resharded to `reshard_to` ranks. A gather then covers fewer ranks."""


def units_of(view: RankView, wrapping: Wrapping, count: int = 1) -> tuple[Unit, ...]:
    """Return the FSDP units in the order in which their forward ends. The root unit comes last.

    With `Wrapping.PER_LAYER`, each of the other units has up to `count` consecutive layers.
    """
    last = len(view.training.model.layers) - 1
    if wrapping is Wrapping.ROOT_ONLY:
        return (Unit(held=view.held, last_layer=last, is_root=True),)
    held = [view.of_layer(index) for index in range(last + 1)]
    layers = tuple(
        Unit(held=tuple(chain.from_iterable(held[at : at + count])), last_layer=min(at + count - 1, last))
        for at in range(0, last + 1, count)
    )
    own = view.of_layer(None)
    return (*layers, Unit(held=own, last_layer=last, is_root=True)) if own else layers


def split_expert_units(units: Iterable[Unit], layout: Layout) -> Iterator[Unit]:
    """Yield all units, with DTensor experts moved from their layer's unit into a separate unit.

    The unit of the experts comes before the unit of the layer, because the experts' forward ends earlier.
    """
    for unit in units:
        experts = [held for held in unit.held if is_dtensor_expert(layout, held.parameter)]
        for layer in dict.fromkeys(held.layer for held in experts):
            assert layer is not None, "experts belong to a layer"
            own = tuple(held for held in experts if held.layer == layer)
            yield Unit(held=own, last_layer=layer, is_of_experts=True)
        yield replace(unit, held=tuple(held for held in unit.held if held not in experts))


def parameter_groups(unit: Unit) -> list[Unit]:
    """Split a unit into experts and other parameters, in the order in which torch finds them."""
    groups: dict[bool, list[Held]] = {}
    for held in unit.held:
        groups.setdefault(held.parameter.expert_dim is not None, []).append(held)
    return [replace(unit, held=tuple(held), group=index, num_groups=len(groups)) for index, held in enumerate(groups.values())]


def split_root(units: Iterable[Unit], fsdp: FSDP2) -> Iterator[Unit]:
    """Split the embedding and the head from the root's unit. The head ends forward before the root."""
    *layers, root = units
    own = root.held if root.is_root else ()
    embedding = tuple(held for held in own if fsdp.embedding_unit and held.name == EMBEDDING)
    head = tuple(held for held in own if fsdp.head_unit and held.parameter.owner is ParameterOwner.HEAD)
    rest = tuple(held for held in root.held if held not in (*embedding, *head))
    if embedding:
        yield Unit(held=embedding, last_layer=-1, is_embedding=True)
    yield from layers
    if head:
        yield Unit(held=head, last_layer=root.last_layer, is_head=True)
    if rest:
        yield replace(root, held=rest)
