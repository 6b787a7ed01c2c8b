"""Observes each collective of this process, from Python or from C++ (DDP's reducer, functional collectives, compiled code).

Private torch API: the operators ``c10d::*``, because every call of a process group passes through them; and the methods of
`ProcessGroup`, because up to torch 2.14 an operator's arguments do not reveal the reduction. Tested with torch 2.9, 2.13 and
2.15.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivcheck.worlds.gloo.matching.journal import Issued

Listener = Callable[[Issued, str, tuple[int, ...]], None]
"""Called with a call, its group's name, and the group's global ranks."""

_KEY = "BackendSelect"
"""Dispatch key that every operator passes, below autograd and all modes. A call seen here is really executed."""
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

_OPS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "broadcast_": ("broadcast", "tensors"),
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "gather_": ("gather", "input_tensors"),
    "gather_into_tensor_": ("gather", "input_tensor"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "monitored_barrier_": ("monitored_barrier", ""),
}
"""Operators with the same arguments on all members: name in `Call`, and the argument that describes the call."""
_UNSIZED = ("all_to_all",)
"""Calls whose members may pass different sizes."""
_GATHERS_LISTS = "c10d::allgather_"
"""Operator whose unequal output sizes gloo itself refuses, with a better message than a mismatch."""
_REDUCING_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
)
_FUNCTIONAL = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out",
)
_DEFAULT = "sum"
"""Reduction for calls without an explicit reduction, issued only by C++ (DDP's reducer)."""
_REDUCTIONS: Any = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_NAMES = {op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}

_said = threading.local()
_registered: list[Any] = []
"""Libraries that must stay alive, because a library unregisters its kernels when it is freed."""


def listen_to_collectives(listener: Listener) -> None:
    """Call `listener` before each later gloo collective in this process. Call this function only once in a process."""
    library: Any = torch.library.Library
    collectives, functional = library("c10d", "IMPL"), library("_c10d_functional", "IMPL")
    _registered.extend((collectives, functional))
    for name in _present(torch.ops.c10d, _OPS):
        op = getattr(torch.ops.c10d, name).default
        collectives.impl(name, _listening(op, *_OPS[name], listener), _KEY, with_keyset=True)
    for name in _present(torch.ops._c10d_functional, _FUNCTIONAL):
        functional.impl(name, _functional(getattr(torch.ops._c10d_functional, name).default), _KEY, with_keyset=True)
    for name in _REDUCING_METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _telling(getattr(dist.ProcessGroup, name)))


def _present(namespace: Any, names: Sequence[str] | dict[str, Any]) -> list[str]:
    return [name for name in names if hasattr(namespace, name)]


def _listening(op: Any, name: str, described: str, listener: Listener) -> Callable[..., Any]:
    """Return a kernel for a collective. It notifies the listener and redispatches."""
    places = {argument.name: place for place, argument in enumerate(op._schema.arguments)}
    group_at, tensors_at, root_at = places["process_group"], places.get(described), places.get("root_rank")
    gathered_at = places["output_tensors"] if op._schema.name == _GATHERS_LISTS else None
    reduces, sized, redispatch = "reduce_op" in places, name not in _UNSIZED, op._handle.redispatch_boxed

    def kernel(keyset: Any, *arguments: Any) -> Any:
        group: Any = dist.ProcessGroup.unbox(arguments[group_at])
        ranks = _gloo_ranks(group)
        if ranks and not keyset.has(torch._C.DispatchKey.Meta):  # with that, a compiler asks for shapes
            tensors = () if tensors_at is None else _flat(arguments[tensors_at])
            root = None if root_at is None else dict(enumerate(ranks)).get(arguments[root_at])
            full_name = f"{name}.{getattr(_said, 'reduction', _DEFAULT)}" if reduces else name
            shapes, dtypes = tuple([tensor.shape for tensor in tensors]), tuple([tensor.dtype for tensor in tensors])
            agrees = sized and (gathered_at is None or len({part.numel() for part in _flat(arguments[gathered_at])}) == 1)
            listener(Issued(full_name, shapes, dtypes, root, agrees), c10d._world.pg_names[group], ranks)
        return redispatch(keyset & _BELOW, *arguments)

    return kernel


def _flat(tensors: Any) -> Sequence[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    (nested,) = tensors if tensors and not isinstance(tensors[0], torch.Tensor) else (tensors,)
    return nested  # type: ignore[no-any-return]


def _gloo_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks in a gloo group, in group order; empty for other backends."""
    backend = c10d._world.pg_map.get(group)
    if backend is None or "gloo" not in backend[0]:
        return ()
    return tuple(c10d._world.pg_group_ranks[group])


def _functional(op: Any) -> Callable[..., Any]:
    """Return a kernel for a functional reduction. It remembers the reduction for the collective that it issues."""
    place = [argument.name for argument in op._schema.arguments].index("reduce_op")

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        given = arguments[place]
        with _Reduction(given.lower() if isinstance(given, str) else _reduction((given,))):
            return op._handle.redispatch_boxed(keyset & _BELOW, *arguments, **options)

    return kernel


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a process group method that remembers its reduction while it runs."""

    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        with _Reduction(_reduction((*arguments, *options.values()))):
            return method(group, *arguments, **options)

    return call


def _reduction(arguments: Sequence[Any]) -> str:
    for argument in reversed(arguments):
        op: Any = getattr(argument, "reduceOp", argument)
        if isinstance(op, _REDUCTIONS):
            return _NAMES[getattr(op, "op", op)]
    return _DEFAULT


class _Reduction:
    """Sets the reduction for this thread's calls."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = getattr(_said, "reduction", _DEFAULT)
        _said.reduction = self._name

    def __exit__(self, *_: object) -> None:
        _said.reduction = self._before
