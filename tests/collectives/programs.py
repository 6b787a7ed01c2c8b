"""What ranks do: issue generated calls and hand back NumPy arrays. Importable, so that ranks that are processes find it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collectives.cases import Case, Kind, inputs_of
from collectives.model import Array

Tensors = list[torch.Tensor]
Issued = tuple[Tensors, Any]
"""What a call fills, and its handle."""

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_kept = threading.local()


@dataclass(slots=True, kw_only=True)
class Result:
    """What one call left on one member."""

    outputs: list[Array] = field(default_factory=list)
    """What it received, waited for."""
    early: list[Array] = field(default_factory=list)
    """The same between issue and wait, if that was asked for; only a simulated rank may look."""
    error: str = ""
    """``Type: message`` if the call raised."""


def group_of(ranks: Sequence[int]) -> Any:
    """The group of those global ranks, made at first use and kept with its world; every rank of the world must ask for it.

    With it one of all other ranks is made: where each rank is in as many groups, processes serve the next program as well.
    """
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    groups: dict[tuple[int, ...], Any] = _kept.__dict__.setdefault("groups", {})
    key = tuple(ranks)
    if key not in groups:
        others = tuple(rank for rank in range(dist.get_world_size()) if rank not in key)
        groups.update({each: dist.new_group(list(each)) for each in (key, others)})
    return groups[key]


def tensor_of(array: Array, dtype: str) -> torch.Tensor:
    """A tensor of its own memory."""
    return torch.tensor(array, dtype=getattr(torch, dtype))


def laid_out(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, in memory as the case wants it."""
    if not case.strided:
        return tensor
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


def array_of(tensor: torch.Tensor) -> Array:
    """A copy, with bfloat16 as float32."""
    tensor = tensor.detach()
    return np.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def arrays_of(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """Copies."""
    return [array_of(tensor) for tensor in tensors]


def run_batch(cases: Sequence[Case], peek: bool) -> list[Result | None]:
    """Issue each call, then wait for those that are asynchronous, the last first; None where the caller is no member.

    What a call raises is its result, so the world need not be built anew. With `peek`, outputs are looked at before the wait.
    """
    results: list[Result | None] = []
    pending: list[tuple[Result, Issued]] = []
    for case in cases:
        result = Result()
        with noted(result):
            issued = _issue(case)
        results.append(None if dist.get_rank() not in case.group else result)
        if results[-1] is None or result.error:
            continue
        result.early = arrays_of(issued[0]) if peek else []
        pending.append((result, issued))
        if not case.asynchronous:
            _finish(*pending.pop())
    while pending:
        _finish(*pending.pop())
    return results


@contextlib.contextmanager
def noted(result: Result) -> Iterator[None]:
    """Put what is raised into a result."""
    try:
        yield
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"


def _finish(result: Result, issued: Issued) -> None:
    outputs, work = issued
    with noted(result):
        work.wait()
    result.outputs = arrays_of(outputs)


def extreme_of_nan(op: str) -> Array:
    """The least or greatest of what ranks have, of which rank 0 has NaN only."""
    tensor = torch.full((3,), torch.nan if dist.get_rank() == 0 else 1.0)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()))
    return array_of(tensor)


def _issue(case: Case) -> Issued:
    group = group_of(case.group)
    if dist.get_rank() not in case.group:
        return [], None
    member = case.group.index(dist.get_rank())
    inputs = [laid_out(case, tensor_of(array, case.dtype)) for array in inputs_of(case, member)]
    return ISSUE[case.kind](case, group, member, inputs)


def _blank(case: Case, sender: int, receiver: int) -> torch.Tensor:
    return laid_out(case, torch.full(case.part_shape(sender, receiver), 1, dtype=getattr(torch, case.dtype)))


def _op(case: Case) -> Any:
    return getattr(dist.ReduceOp, case.op.upper())


def _root(case: Case) -> int:
    return case.group[case.root]


def _all_reduce(case: Case, group: Any, _: int, inputs: Tensors) -> Issued:
    return inputs, dist.all_reduce(inputs[0], op=_op(case), group=group, async_op=True)


def _reduce(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    work = dist.reduce(inputs[0], dst=_root(case), op=_op(case), group=group, async_op=True)
    return inputs if member == case.root else [], work


def _broadcast(case: Case, group: Any, _: int, inputs: Tensors) -> Issued:
    return inputs, dist.broadcast(inputs[0], src=_root(case), group=group, async_op=True)


def _reduce_scatter(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    output = _blank(case, 0, member)
    return [output], dist.reduce_scatter(output, inputs, op=_op(case), group=group, async_op=True)


def _reduce_scatter_single(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    output = _blank(case, 0, member)
    return [output], reduce_scatter_single(output, torch.cat(inputs), op=_op(case), group=group, async_op=True)


def _all_gather(case: Case, group: Any, _: int, inputs: Tensors) -> Issued:
    outputs = [_blank(case, sender, 0) for sender in range(len(case.group))]
    return outputs, dist.all_gather(outputs, inputs[0], group=group, async_op=True)


def _all_gather_single(case: Case, group: Any, _: int, inputs: Tensors) -> Issued:
    output = torch.cat([_blank(case, 0, 0)] * len(case.group))
    work = all_gather_single(output, inputs[0], group=group, async_op=True)
    return list(output.chunk(len(case.group))) if len(output) else [output] * len(case.group), work


def _gather(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    outputs = [_blank(case, sender, 0) for sender in range(len(case.group))] if member == case.root else []
    return outputs, dist.gather(inputs[0], outputs or None, dst=_root(case), group=group, async_op=True)


def _scatter(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    output = _blank(case, case.root, member)
    parts = inputs if member == case.root else None
    return [output], dist.scatter(output, parts, src=_root(case), group=group, async_op=True)


def _all_to_all(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    outputs = [_blank(case, sender, member) for sender in range(len(case.group))]
    return outputs, dist.all_to_all(outputs, inputs, group=group, async_op=True)


def _all_to_all_single(case: Case, group: Any, member: int, inputs: Tensors) -> Issued:
    outputs = [_blank(case, sender, member) for sender in range(len(case.group))]
    output, sizes = torch.cat(outputs), [len(tensor) for tensor in outputs]
    given = (sizes, [len(tensor) for tensor in inputs]) if case.rows else ()
    work = dist.all_to_all_single(output, torch.cat(inputs), *given, group=group, async_op=True)
    return list(output.split(sizes)), work


ISSUE: dict[Kind, Callable[[Case, Any, int, Tensors], Issued]] = {
    Kind.BROADCAST: _broadcast,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.REDUCE_SCATTER_SINGLE: _reduce_scatter_single,
    Kind.ALL_GATHER: _all_gather,
    Kind.ALL_GATHER_SINGLE: _all_gather_single,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.ALL_TO_ALL_SINGLE: _all_to_all_single,
}
