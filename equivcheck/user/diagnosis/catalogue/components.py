"""Mistakes in fused weights, such as query, key and value in one: split as one block, or read from the wrong places."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.mistakes.initial_values import start_as_ranks
from equivcheck.diagnosis.words import join_words, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, held_indices, parameters_by_name, split_dim
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.ranks import build_model
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.pieces import assemble_tensors
from equivcheck.worlds.trace.trace import Snapshot

MAX_TRIES = 32
"""Largest number of combinations to try: groups of layers, with their components."""
MAX_GROUPS_IN_PAIRS = 4
"""Largest number of groups to try in pairs. A model with more of them, such as query, key, value, gate and up, fuses few."""
EQUAL = (2, 3)
"""Numbers of equal components: gate and up, or query, key and value."""
QUERIES = (2, 4, 8)
"""How many times larger the queries may be than the keys, and the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """An order of a tensor's indices along one dim."""

    dim: int
    """Dim along which the indices are reordered."""
    indices: torch.Tensor
    """For each new index along the dim, the index in the original tensor."""


Orders = Mapping[str, _Order]
"""Orders by parameter name."""


def component_sizes(size: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield possible sizes for the components of a fused dim, such as query, key and value.

    Each yielded tuple adds up to `size`, and `num_ranks` ranks can split each of its components evenly.
    """
    for shares in (*((1,) * count for count in EQUAL), *((times, 1, 1) for times in QUERIES)):
        if size % (sum(shares) * num_ranks) == 0:
            yield tuple(size // sum(shares) * share for share in shares)


def order_in_blocks(sizes: Sequence[int], num_ranks: int) -> torch.Tensor:
    """Return a fused dim's indices in the order in which ranks use them, if ranks wrongly split the dim as one block.

    Each rank treats its block as if it contained a part of every component. The order lists all ranks' parts of the first
    component, then of the next.
    """
    blocks = torch.arange(sum(sizes)).chunk(num_ranks)
    parts = [torch.split(block, [size // num_ranks for size in sizes]) for block in blocks]
    return torch.cat([part[number] for number in range(len(sizes)) for part in parts])


def fused_as_one_block(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: ranks split a fused weight as one block, but compute as if they had a part of each component.

    Each fused weight is tried.
    """
    for axis in diverged.same_row_axes if not diverged.first.step else ():
        num_ranks, candidates = diverged.size((axis,)), _column_wise(diverged, axis)
        fused = [(dims, sizes) for size, dims in candidates for sizes in component_sizes(size, num_ranks)]
        paired = fused if len(candidates) <= MAX_GROUPS_IN_PAIRS else []
        pairs = [(one, other) for one, other in combinations(paired, 2) if one[0] is not other[0]]
        for chosen in [*((each,) for each in fused), *pairs][:MAX_TRIES]:
            orders = {
                name: _Order(dim=dim, indices=order_in_blocks(sizes, num_ranks))
                for dims, sizes in chosen
                for name, dim in dims.items()
            }
            read = join_words([f"{tensors(tuple(dims))} as {_describe(sizes)}" for dims, sizes in chosen])
            split = f"{diverged.ranks_text((axis,))} split {'it' if len(orders) == 1 else 'them'} as one block"
            words = f"your model reads {read}, but {split}: split each component by itself"
            yield Mistake(Cause.PERMUTED, words, partial(_compute_reordered, orders=orders))


def _describe(sizes: Sequence[int]) -> str:
    ratio = "" if len(set(sizes)) == 1 else f" in the ratio {':'.join(str(each // min(sizes)) for each in sizes)}"
    return f"{len(sizes)} components{ratio}"


def _column_wise(diverged: DivergedTraining, axis: str) -> list[tuple[int, dict[str, int]]]:
    """Sizes of dims split as one block, with dims by parameter name. Layers whose names differ only in numbers are together."""
    model = build_model(diverged.task)
    found: dict[tuple[int, str], dict[str, int]] = {}
    for name, value in parameters_by_name(model).items():
        dim, owner = split_dim(diverged, name, axis), name.rpartition(".")[0]
        if dim is None or (dim and isinstance(model.get_submodule(owner), nn.Linear)):
            continue  # a linear layer's inputs are not fused
        blocks = torch.arange(value.shape[dim]).chunk(diverged.size((axis,)))
        if all(map(torch.equal, held_indices(diverged, name, axis, dim), blocks)):
            found.setdefault((value.shape[dim], re.sub(r"\d+", "*", owner)), {})[name] = dim
    return [(size, dims) for (size, _), dims in found.items()]


def _compute_reordered(ranks: EmulatedUserRanks, *, orders: Orders) -> None:
    by_owner: dict[str, dict[str, _Order]] = {}
    for name, order in orders.items():
        owner, _, own = name.rpartition(".")
        by_owner.setdefault(owner, {})[own] = order
    for model in ranks.models:
        for owner, own_orders in by_owner.items():
            module: Any = model.get_submodule(owner)
            module.forward = _Reordered(module, module.forward, own_orders)


@dataclass(frozen=True, slots=True)
class _Reordered:
    """A module's forward with parameters in another order."""

    module: Any
    forward: Callable[..., Any]
    orders: Orders

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        given = {name: getattr(self.module, name).index_select(order.dim, order.indices) for name, order in self.orders.items()}
        self.module.forward = self.forward
        try:
            return functional_call(self.module, given, inputs, keywords)
        finally:
            self.module.forward = self


def wrong_components(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in the user's `cuts`: ranks hold parts of each component but `cuts` describes one block, or the reverse."""
    if diverged.task.cuts is None:
        return
    right = diverged.right_initial_values
    found = {name: values for name, values in assemble_tensors(diverged.initial).items() if name in right}
    wrong = [name for name, values in found.items() if values.shape == right[name].shape and (values != right[name]).any()]
    for axis in diverged.same_row_axes if wrong else ():
        num_ranks = diverged.size((axis,))
        dims = {name: dim for name in wrong if (dim := split_dim(diverged, name, axis)) is not None}
        for is_block in (False, True):
            sizes = {name: _sizes_that_fit(found[name], right[name], dim, num_ranks, is_block) for name, dim in dims.items()}
            if len(dims) < len(wrong) or not all(sizes.values()):
                continue
            if is_block:
                words = f"{diverged.ranks_text((axis,))} split {tensors(wrong)} as one block, but `cuts` describes components: "
                yield Mistake(Cause.PERMUTED, f"{words}split each component by itself", partial(start_as_ranks, diverged))
                continue
            first, own = wrong[0], sizes[wrong[0]]
            entry = {first: ((dims[first], axis, len(own) if len(set(own)) == 1 else own),)}
            words = f"your ranks split each component of {tensors(wrong)}, but `cuts` describes one block: pass cuts={entry}"
            words += ", and the same for the others" if len(wrong) > 1 else ""
            orders = {name: _Order(dim=dim, indices=_misread(sizes[name], num_ranks)) for name, dim in dims.items()}
            yield Mistake(Cause.PERMUTED, words, partial(_read_reordered, orders=orders))


def _misread(sizes: Sequence[int], num_ranks: int) -> torch.Tensor:
    """Return the index in the components for each index in blocks: the inverse of `order_in_blocks`."""
    return order_in_blocks(sizes, num_ranks).argsort()


def _sizes_that_fit(found: np.ndarray, right: np.ndarray, dim: int, num_ranks: int, is_block: bool) -> tuple[int, ...]:
    """Return component sizes with which one order gives the other order of initial values; empty if there are none.

    If `is_block`, the ranks' values are the components read as one block, otherwise one block read as components.
    """
    order = order_in_blocks if is_block else _misread
    fitting = component_sizes(right.shape[dim], num_ranks)
    return next((sizes for sizes in fitting if np.array_equal(found, right.take(order(sizes, num_ranks).numpy(), dim))), ())


def _read_reordered(ranks: EmulatedUserRanks, *, orders: Orders) -> None:
    def read(trace: UserTrace) -> UserTrace:
        steps = tuple(
            replace(step, gradients=_reordered(step.gradients, orders), parameters=_reordered(step.parameters, orders))
            for step in trace.steps
        )
        return replace(trace, steps=steps, state=_reordered(trace.state, orders))

    ranks.reads = read


def _reordered(snapshot: Snapshot, orders: Orders) -> Snapshot:
    """Return a single device's tensors, and optimizer state with the same shapes, in another order."""
    values, place = snapshot.values.copy(), 0
    for piece, present in zip(snapshot.pieces, snapshot.present, strict=True):
        order = orders.get(piece.name.partition("/")[0])
        end = place + (piece.numel if present else 0)
        if order is not None and present and piece.shape[order.dim : order.dim + 1] == (len(order.indices),):
            values[place:end] = snapshot.values[place:end].reshape(piece.shape).take(order.indices.numpy(), order.dim).reshape(-1)
        place = end
    return replace(snapshot, values=values)
