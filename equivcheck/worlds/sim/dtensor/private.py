"""Shares DTensor's propagation results between ranks. Private torch API, tested with torch 2.9, 2.13 and 2.15.

For each operation DTensor computes the result's shape by tracing on fake tensors, and its sharding by comparing all strategies.
It caches both per thread (`equivcheck.worlds.dtensor_caches`), so once for each rank. Here ranks share results that do not depend
on the rank, in caches of limited size.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch

from equivcheck.worlds.dtensor_caches import PROPAGATION, forget_shardings, num_plans
from equivcheck.worlds.sim.dtensor.meta import UNKNOWN, answer_on_meta
from equivcheck.worlds.sim.dtensor.orders import cached_shard_orders
from equivcheck.worlds.sim.dtensor.patterns import PARTICULAR, pattern_of

T = TypeVar("T")

UNSHARED_ONE_IN = 32
"""One run in this many shares nothing, to reveal errors that sharing would hide."""
MAX_SHARED = 2_000
"""Entries in each shared cache before it is cleared; a shape takes about half a kilobyte, a sharding two kilobytes."""

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_DECOMPOSITIONS = "torch.distributed.tensor._decompositions"
"""torch 2.11 and later. An operation without a strategy is traced once for each combination of its arguments' placements."""
_SHAPES = "_propagate_tensor_meta_non_cached"
_SHARDINGS = "propagate_op_sharding_non_cached"
_STATELESS = ("Shard", "Replicate", "Partial", "_NormPartial", "_StridedShard")
"""Placements with only a shard position as state."""
_shapes: dict[Hashable, Any] = {}
_patterns: dict[Hashable, Any] = {}
_shardings: dict[Hashable, Any] = {}
_work: Counter[str] = Counter()
"""How many decompositions DTensor traced in this process, for all ranks together."""


@contextlib.contextmanager
def shared_propagation() -> Iterator[set[str]]:
    """Inside this context, let rank threads share the results of DTensor's sharding propagation.

    Yields a set. DTensor's requests for a sharding are added to it, each as the operation with its arguments' placements. No
    effect if DTensor is not imported.
    """
    asked: set[str] = set()
    propagator = getattr(sys.modules.get(PROPAGATION), "ShardingPropagator", None)
    wrappers: dict[str, Callable[[Any], Any]] = {_SHAPES: _sharing_shapes, _SHARDINGS: partial(_sharing_shardings, asked)}
    originals = {name: getattr(propagator, name) for name in wrappers if hasattr(propagator, name)}
    for name, original in originals.items():
        setattr(propagator, name, wrappers[name](original))
    try:
        with cached_shard_orders(), _counted_decompositions():
            yield asked
    finally:
        for name, original in originals.items():
            setattr(propagator, name, original)


def num_planning_steps() -> int:
    """Count redistributions that DTensor planned, and decompositions that it traced to find a sharding.

    The scheduler counts them as progress, because planning one attention on a mesh with two axes can take half a minute of CPU
    time.
    """
    return num_plans() + _work[_DECOMPOSITIONS]


@contextlib.contextmanager
def _counted_decompositions() -> Iterator[None]:
    """Inside this context, count the decompositions that DTensor traces."""
    strategy = getattr(sys.modules.get(_DECOMPOSITIONS), "DecompShardingStrategy", None)
    original: Any = None if strategy is None else vars(strategy)["_propagate_through_decomp"]  # a static method on torch 2.11
    if strategy is None:
        yield
        return

    def count_and_trace(*args: Any, **kwargs: Any) -> Any:
        _work[_DECOMPOSITIONS] += 1
        return getattr(original, "__func__", original)(*args, **kwargs)

    strategy._propagate_through_decomp = staticmethod(count_and_trace) if isinstance(original, staticmethod) else count_and_trace
    try:
        yield
    finally:
        strategy._propagate_through_decomp = original


def is_unshared(schedule_seed: int) -> bool:
    """Whether ranks do not share DTensor's caches in a run with this schedule seed.

    Ranks share no caches with a few seeds, to show whether the sharing itself causes errors.
    """
    return crc32(str(schedule_seed).encode()) % UNSHARED_ONE_IN == 0


def without_caches(program: Callable[[], T]) -> Callable[[], T]:
    """Return a function that clears the calling rank's DTensor caches and then calls `program`."""

    def run() -> T:
        forget_shardings()
        return program()

    return run


def _sharing_shapes(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def propagate(propagator: Any, schema: Any) -> Any:
        key = _key_of(schema, _meta)
        if key is None:
            return original(propagator, schema)
        if key not in _shapes:
            _bound(_shapes)
            _shapes[key] = _by_pattern(schema, lambda: _traced(schema, lambda: original(propagator, schema)))
        shape = _shapes[key]
        return list(shape) if isinstance(shape, list) else shape

    return propagate


def _traced(schema: Any, trace: Callable[[], Any]) -> Any:
    found = answer_on_meta(schema)
    return trace() if found is UNKNOWN else found


def _by_pattern(schema: Any, trace: Callable[[], Any]) -> Any:
    """Return the traced result. It is reused from other sizes if it follows from the argument shapes."""
    pattern = pattern_of(schema)
    if pattern is None:
        return trace()
    general = _patterns.get(pattern.key, PARTICULAR)
    if general is not PARTICULAR:
        return pattern.answer(general)
    found = trace()
    _bound(_patterns)
    _patterns[pattern.key] = pattern.general(found)
    return found


def _sharing_shardings(asked: set[str], original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def propagate(propagator: Any, schema: Any) -> Any:
        specs = tuple(_specs([*schema.args_schema, *schema.kwargs_schema.values()]))
        asked.add(" ".join((str(schema.op), *(str(spec.placements) for spec in specs))))
        meshes = tuple({id(spec.mesh): spec.mesh for spec in specs}.values())
        key = None if any(map(_is_strided, specs)) or not specs else _key_of(schema, _placed)
        if key is None:
            return original(propagator, schema)
        key = (key, _pattern(specs, meshes))
        if key in _shardings:
            found, theirs = _shardings[key]
            return _moved(found, {id(mesh): own for mesh, own in zip(theirs, meshes, strict=True)})
        metas = [spec.tensor_meta for spec in specs]
        found = original(propagator, schema)
        # Results are not shared if they hold sizes of this rank's shard. Nor if propagation has changed an argument, as that of
        # select() does on torch 2.9: every rank must change its own.
        if found.use_val_from_redistribute_schema or [spec.tensor_meta for spec in specs] != metas:
            return found
        if not _is_own(found, meshes):
            _bound(_shardings)
            # A copy, because a later operation of this rank can change the specs that it was given.
            _shardings[key] = _moved(found, {id(mesh): mesh for mesh in meshes}), meshes
        return found

    return propagate


def _is_strided(spec: Any) -> bool:
    """Whether a tensor has strided shards.

    DTensor searches for redistributions of strided shards. The search remembers earlier requests, which can change later results,
    so every rank must issue the same requests.
    """
    return any(type(placement).__name__ == "_StridedShard" for placement in spec.placements)


def _pattern(specs: Sequence[Any], meshes: Sequence[Any]) -> Hashable:
    """Return a key that groups tensors by mesh object and meshes by equality, and says whether the rank is in each mesh."""
    places = {id(mesh): index for index, mesh in enumerate(meshes)}
    return (
        tuple(places[id(spec.mesh)] for spec in specs),
        tuple(meshes.index(mesh) for mesh in meshes),
        tuple(mesh.get_coordinate() is None for mesh in meshes),
    )


def _specs(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the specs of all DTensors among the arguments, including those in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _specs(value)
        elif hasattr(value, "tensor_meta"):
            yield value


def _is_own(value: Any, meshes: Sequence[Any]) -> bool:
    """Whether a result belongs to one rank.

    It may hold a placement with state, such as the mask of a vocabulary-parallel embedding, or a mesh other than those of the
    arguments.
    """
    if isinstance(value, (list, tuple)):
        return any(_is_own(part, meshes) for part in value)
    if isinstance(value, dict):
        return _is_own(list(value.values()), meshes)
    if hasattr(value, "placements"):
        has_state = any(type(placement).__name__ not in _STATELESS for placement in value.placements)
        return has_state or all(value.mesh is not mesh for mesh in meshes)
    if hasattr(value, "args_schema"):
        return _is_own((value.args_schema, value.kwargs_schema), meshes)
    if hasattr(value, "redistribute_schema"):
        return _is_own((value.output_spec, value.redistribute_schema), meshes)
    return False


def _moved(value: Any, own: Mapping[int, Any]) -> Any:
    """Return one rank's result with its mesh objects replaced by those of another rank, keyed by `id`.

    The meshes have the same ranks, but each rank has its own mesh objects.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(part, own) for part in value)
    if isinstance(value, dict):
        return {name: _moved(part, own) for name, part in value.items()}
    if hasattr(value, "placements"):
        moved = copy.copy(value)
        moved.mesh = own[id(value.mesh)]
        return moved
    if hasattr(value, "args_schema"):
        return type(value)(value.op, _moved(value.args_schema, own), _moved(value.kwargs_schema, own), value.schema_info)
    if hasattr(value, "redistribute_schema"):
        return type(value)(
            _moved(value.output_spec, own), _moved(value.redistribute_schema, own), needs_redistribute=value.needs_redistribute
        )
    return value


def forget_shared() -> None:
    """Clear the DTensor caches that ranks share. Call it after DTensor's sharding rules may have changed."""
    _shapes.clear()
    _shardings.clear()


def _bound(answers: dict[Hashable, Any]) -> None:
    """Clear a cache that is full, and fake tensor tracing's cache, whose size is not limited by torch."""
    if len(answers) >= MAX_SHARED:
        answers.clear()
        clear = getattr(getattr(sys.modules.get(_FAKE_TENSORS), "FakeTensorMode", None), "cache_clear", None)
        if clear is not None:
            clear()


def _key_of(schema: Any, describe: Callable[[Any], Hashable]) -> Hashable | None:
    """Return a key of all inputs to a result, with specs replaced by `describe`; None if it cannot be determined.

    DTensor's own key leaves out numbers such as learning rates, which differ between scenarios. For such floats this key uses
    only the type.
    """
    if torch._C._len_torch_dispatch_stack():
        return None
    first_static, static_options = _static(schema)
    try:
        arguments = tuple(_frozen(value, describe, index >= first_static) for index, value in enumerate(schema.args_schema))
        options = tuple((name, _frozen(value, describe, name in static_options)) for name, value in schema.kwargs_schema.items())
        key = (schema.op, torch.get_default_dtype(), arguments, options)
        hash(key)
    except TypeError:
        return None
    return key


def _static(schema: Any) -> tuple[int, Sequence[str]]:
    """Return the first positional argument, and the options, whose values are in DTensor's own key."""
    info = schema.schema_info
    return (len(schema.args_schema), ()) if info is None else (info.static_argnum, info.static_kwargkey or ())


def _frozen(value: Any, describe: Callable[[Any], Hashable], is_static: bool) -> Hashable:
    if isinstance(value, (list, tuple)):
        return (type(value), *(_frozen(part, describe, is_static) for part in value))
    if hasattr(value, "tensor_meta"):
        return (type(value), describe(value))
    return (float,) if isinstance(value, float) and not is_static else (type(value), value)


def _meta(spec: Any) -> Hashable:
    """Return the spec fields that determine shapes."""
    meta: Hashable = spec.tensor_meta
    return meta


def _placed(spec: Any) -> Hashable:
    """Return the spec fields that determine shardings: placements and mesh shape, but not the mesh's ranks."""
    mesh = spec.mesh
    order, strided = getattr(spec, "shard_order", None), getattr(spec, "use_strided_shard_as_shard_order", None)
    return (spec.tensor_meta, spec.placements, order, strided, mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names)
