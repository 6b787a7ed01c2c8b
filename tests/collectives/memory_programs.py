"""Calls with tensors that lie in memory in other ways than contiguous. Importable, so that ranks that are processes find it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from collectives.programs import all_gather_single, reduce_scatter_single

SHAPE = (4, 3)

Lay = Callable[[torch.Tensor], torch.Tensor]


def _with_gaps(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((2 * len(values), *values.shape[1:]), -7.0, dtype=values.dtype)
    wide[::2] = values
    return wide[::2]


MEMORIES: dict[str, Lay] = {
    "contiguous": torch.clone,
    "reversed": lambda values: values.t().contiguous().t(),
    "gaps": _with_gaps,
}
"""How a copy of a tensor of two dims may lie in memory."""


def values_of(rank: int, rows: int = SHAPE[0]) -> torch.Tensor:
    """What a rank puts in."""
    return torch.arange(rows * SHAPE[1], dtype=torch.float64).view(rows, SHAPE[1]) + 100 * rank


def is_right(kind: str, first: str, others: str, output: str) -> bool:
    """Whether one call on two ranks gives what it should, with inputs of rank 0, of the others, and outputs that lie as named."""
    rank = dist.get_rank()
    lay, lay_output = MEMORIES[others if rank else first], MEMORIES[output]
    return CALLS[kind](rank, lay, lay_output)


def _outputs(lay: Lay, count: int) -> list[torch.Tensor]:
    return [lay(torch.full(SHAPE, -1.0, dtype=torch.float64)) for _ in range(count)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _broadcast(rank: int, lay: Lay, _: Lay) -> bool:
    tensor = lay(values_of(rank))
    dist.broadcast(tensor, 0)
    return _equal([tensor], [values_of(0)])


def _all_reduce(rank: int, lay: Lay, _: Lay) -> bool:
    tensor = lay(values_of(rank))
    dist.all_reduce(tensor)
    return _equal([tensor], [values_of(0) + values_of(1)])


def _reduce(rank: int, lay: Lay, _: Lay) -> bool:
    tensor = lay(values_of(rank))
    dist.reduce(tensor, 0)
    return bool(rank) or _equal([tensor], [values_of(0) + values_of(1)])


def _scatter(rank: int, lay: Lay, lay_output: Lay) -> bool:
    outputs = _outputs(lay_output, 1)
    dist.scatter(outputs[0], None if rank else [lay(values_of(other)) for other in range(2)], 0)
    return _equal(outputs, [values_of(rank)])


def _gather(rank: int, lay: Lay, lay_output: Lay) -> bool:
    outputs = None if rank else _outputs(lay_output, 2)
    dist.gather(lay(values_of(rank)), outputs, 0)
    return outputs is None or _equal(outputs, [values_of(0), values_of(1)])


def _all_gather(rank: int, lay: Lay, lay_output: Lay) -> bool:
    outputs = _outputs(lay_output, 2)
    dist.all_gather(outputs, lay(values_of(rank)))
    return _equal(outputs, [values_of(0), values_of(1)])


def _all_gather_single(rank: int, lay: Lay, lay_output: Lay) -> bool:
    output = lay_output(torch.zeros(2 * SHAPE[0], SHAPE[1], dtype=torch.float64))
    all_gather_single(output, lay(values_of(rank)))
    return _equal([output], [torch.cat([values_of(0), values_of(1)])])


def _reduce_scatter(rank: int, lay: Lay, lay_output: Lay) -> bool:
    outputs = _outputs(lay_output, 1)
    dist.reduce_scatter(outputs[0], [lay(values_of(rank)) for _ in range(2)])
    return _equal(outputs, [values_of(0) + values_of(1)])


def _reduce_scatter_single(rank: int, lay: Lay, lay_output: Lay) -> bool:
    outputs, rows = _outputs(lay_output, 1), SHAPE[0]
    reduce_scatter_single(outputs[0], lay(values_of(rank, 2 * rows)))
    total = values_of(0, 2 * rows) + values_of(1, 2 * rows)
    return _equal(outputs, [total[rank * rows : (rank + 1) * rows]])


CALLS: dict[str, Callable[[int, Lay, Lay], bool]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
}
"""Each collective that takes tensors of any memory layout: the rank, how its inputs lie, how its outputs lie."""
