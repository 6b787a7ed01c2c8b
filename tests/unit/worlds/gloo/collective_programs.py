"""Programs with mismatched collectives, or with matching ones in unusual orders."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

ONES = torch.ones(4)


def reductions() -> None:
    """Rank 0 sums, and the others take the maximum."""
    dist.all_reduce(ONES.clone(), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def functional_reductions() -> None:
    """Different reductions in a functional collective, which C++ issues."""
    functional.wait_tensor(functional.all_reduce(ONES, "max" if dist.get_rank() else "sum", dist.group.WORLD))


def types() -> None:
    """Different element types of equal size."""
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32))


def second_sizes() -> None:
    """One more element in the second tensor."""
    tensors = [torch.ones(4), torch.ones(2 + dist.get_rank())]
    dist.all_gather_coalesced([[tensor.clone() for tensor in tensors] for _ in range(2)], tensors)


def sizes() -> None:
    """One more element."""
    dist.all_reduce(torch.ones(4 + min(dist.get_rank(), 1)))


def roots() -> None:
    """Each rank names itself as the root."""
    dist.broadcast(ONES.clone(), dist.get_rank())


def kinds() -> None:
    """Rank 0 enters a barrier, and the others reduce."""
    if dist.get_rank():
        dist.all_reduce(ONES.clone())
    else:
        dist.barrier()


def reducers() -> None:
    """Rank 1 issues one more reduction before DDP's reducer, in C++, does."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank():
        dist.all_reduce(ONES.clone())
    model(torch.ones(1, 2)).sum().backward()


def many_tensors() -> None:
    """Many tensors, too many for a call's description."""
    tensors = [torch.ones(100 + number, 1 + dist.get_rank()) for number in range(200)]
    with dist._coalescing_manager(async_ops=False):
        for tensor in tensors:
            dist.all_reduce(tensor)


def shapes() -> list[float]:
    """Equal element counts in different shapes, which gloo accepts."""
    tensor = ONES.reshape(2, 2).clone() if dist.get_rank() else ONES.clone()
    dist.all_reduce(tensor)
    return tensor.flatten().tolist()


def groups_in_any_order() -> list[list[float]]:
    """Two groups, called by rank 0 and the others in opposite orders."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.ones(1 + number) for number in range(2)]
    order = (0, 1) if dist.get_rank() else (1, 0)
    works: list[Any] = [dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in order]
    for work in works:
        work.wait()
    return [tensor.tolist() for tensor in tensors]


def far_ahead(count: int) -> float:
    """Rank 0 issues many calls before any other rank issues one."""
    tensors = [torch.ones(1) for _ in range(count)]
    gate = dist.new_group()
    if dist.get_rank():
        dist.barrier(gate)
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if not dist.get_rank():
        dist.barrier(gate)
    for work in works:
        work.wait()
    return float(sum(map(float, tensors)))


def groups_of_one_name(numbers: tuple[int, ...]) -> list[float]:
    """A group that is destroyed and created again, with a different call each time."""
    found = []
    for number in numbers:
        group = dist.new_group()
        tensor = torch.ones(number)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        found.append(float(tensor.sum()))
    return found
