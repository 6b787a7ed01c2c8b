"""Registry: built-in mutants, and others from entry points."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from equivcheck.errors import EquivCheckError, UsageError, unknown_name
from equivcheck.layouts.composition.registry import kinds_of
from equivcheck.mutants.mutant import BUILT_IN, Mutant

ENTRY_POINTS = "equivcheck.mutants"
"""Entry-point group for third-party mutants; each entry names a `Mutant`."""

_MODULES = (
    "data_parallel.wrapper",
    "data_parallel.gradients",
    "data_parallel.inputs",
    "accumulation.microbatches",
    "accumulation.windows",
    "clipping.norms",
    "clipping.coefficients",
    "sharding.reductions",
    "sharding.divide_factors",
    "sharding.replica_hooks",
    "sharding.expert_meshes",
    "sharding.chunked_losses",
    "sharding.updates",
    "sharding.optimizer_state",
    "tensor_parallel.sums",
    "tensor_parallel.shards",
    "tensor_parallel.plain_tensors",
    "tensor_parallel.adapters",
    "spmd",
    "pipeline.stages",
    "pipeline.calls",
    "pipeline.presplit",
    "tokens.label_counts",
    "tokens.label_weights",
    "tokens.labels",
    "tokens.documents",
    "tokens.second_predictions",
    "tokens.attention",
    "tokens.vocabulary",
    "tokens.sums",
    "tokens.key_value",
    "tokens.embeddings",
    "experts.weights",
    "experts.choices",
    "experts.exchange",
    "experts.groups",
    "experts.gradients",
    "experts.partial_sums",
    "experts.balance",
    "experts.router_bias",
    "experts.units",
    "context_parallel.positions",
    "context_parallel.documents",
    "context_parallel.exchanges",
    "context_parallel.sums",
    "optimizer.settings",
    "optimizer.state",
    "optimizer.in_backward",
    "precision",
    "runtime",
)
"""Built-in modules in listing order."""


class BrokenMutant(EquivCheckError):
    """Error if an entry point does not provide a usable mutant."""


@cache
def mutants() -> dict[str, Mutant]:
    """Return all mutants by name, built-in mutants first. Raises `BrokenMutant` if an entry point is broken."""
    found: dict[str, Mutant] = {}
    for name in _MODULES:
        module = import_module(f"equivcheck.mutants.{name}").__name__
        for built_in in BUILT_IN[module]:
            assert built_in.name not in found, built_in.name
            found[built_in.name] = built_in
    for point in entry_points(group=ENTRY_POINTS):
        other = _load(point)
        if other.name in found:
            raise BrokenMutant(f"{_place(point)}: name {other.name!r} is not valid: it is taken. Expected a unique name")
        found[other.name] = other
    return found


def mutant(name: str) -> Mutant:
    """Look up a mutant. Raises `UsageError` for an unknown name and `BrokenMutant` for a broken entry point."""
    if name not in mutants():
        raise unknown_name("mutant", name, mutants())
    return mutants()[name]


def mutants_of(names: Collection[str]) -> tuple[Mutant, ...]:
    """Return the mutants that can be planted in any of the named layouts. Raises `UsageError` for an unknown layout."""
    for name in names:
        kinds_of(name)
    return tuple(found for found in mutants().values() if not set(names).isdisjoint(found.layouts))


def _load(point: EntryPoint) -> Mutant:
    try:
        loaded = point.load()
    except Exception as error:
        raise BrokenMutant(f"{_place(point)}: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, Mutant):
        raise BrokenMutant(f"{_place(point)}: {loaded!r} is not valid: it is not a Mutant. Expected a Mutant")
    try:
        for name in loaded.layouts:
            kinds_of(name)
    except UsageError as error:
        raise BrokenMutant(f"{_place(point)}: {error}") from error
    return loaded


def _place(point: EntryPoint) -> str:
    return f"entry point {point.name!r} of {ENTRY_POINTS} ({point.value})"
