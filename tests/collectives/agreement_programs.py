"""Programs whose values are the same in sim and over gloo. Importable, so that ranks that are processes find them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Program = Callable[[], Any]

_runs = threading.local()


def mine(*shape: int) -> torch.Tensor:
    """A tensor that tells its rank."""
    return torch.full(shape, 10.0 * dist.get_rank()) + torch.arange(float(torch.Size(shape).numel())).view(shape)


def lists_of_several_tensors() -> list[list[list[float]]]:
    """Outputs come by rank and then by tensor; tensors may differ in size."""
    outputs = [[torch.empty(2), torch.empty(3)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, [mine(2), mine(3)])
    return [[tensor.tolist() for tensor in theirs] for theirs in outputs]


def barrier_completes_what_was_issued() -> tuple[list[float], bool]:
    """A barrier waits for the caller's earlier calls."""
    tensor = mine(2)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    return tensor.tolist(), work.is_completed()


def barrier_handle_completes_what_was_issued() -> list[float]:
    """So does the handle of one."""
    tensor = mine(2)
    dist.all_reduce(tensor, async_op=True)
    handle = dist.barrier(async_op=True)
    assert handle is not None
    handle.wait()
    return tensor.tolist()


def gather_into_an_output() -> list[float]:
    """The functional form with ``out=``, which compiled code calls."""
    functional: Any = torch.ops._c10d_functional
    output = torch.empty(2 * dist.get_world_size())
    name = dist.group.WORLD.group_name
    return functional.wait_tensor(
        functional.all_gather_into_tensor_out(mine(2), dist.get_world_size(), name, out=output)
    ).tolist()


def sparse_sum() -> tuple[list[list[float]], bool]:
    """Indices differ from rank to rank, and may be there twice or not at all."""
    rank = dist.get_rank()
    indices = torch.tensor([[0, 0, rank][: 3 * rank + 1]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1], 2), (4, 2))
    dist.all_reduce(tensor)
    return tensor.to_dense().tolist(), tensor.is_coalesced()


def sparse_gradients() -> list[list[float]]:
    """DDP adds sparse gradients of embeddings."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([dist.get_rank(), 3])).sum().backward()
    return model.module.weight.grad.to_dense().tolist()


def joined() -> list[list[float]]:
    """Ranks with fewer batches join, and gradients are divided by the number of those that are left."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad.tolist()


def hooks_that_wait() -> list[list[list[float]]]:
    """Communication hooks of DDP that wait inside, or chain on the future of a handle."""

    def waits(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def chains(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / 2)

    found = []
    for hook in (waits, chains):
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model.register_comm_hook(None, hook)
        model(mine(1, 2)).sum().backward()
        found.append(model.module.weight.grad.tolist())
    return found


def defaults_of_a_group() -> list[Any]:
    """Arguments that a group's methods give a default, and names."""
    group: Any = dist.group.WORLD
    root = group.rank() == 0
    reduced, told, most, last = mine(2), mine(2), mine(2), mine(2)
    gathered, scattered = [torch.empty(2) for _ in range(group.size())] if root else [], torch.empty(2)
    group.reduce([reduced]).wait()
    group.broadcast([told]).wait()
    group.allreduce(most, op=dist.ReduceOp.MAX).wait()
    group.reduce(last, root=1, op=dist.ReduceOp.MIN).wait()
    group.gather(gathered, mine(2), 0).wait()
    group.scatter(scattered, [mine(2)] * group.size() if root else [], 0).wait()
    kept = [last.tolist()] if group.rank() == 1 else []
    return [
        reduced.tolist() if root else None,
        told.tolist(),
        most.tolist(),
        [each.tolist() for each in gathered],
        scattered.tolist(),
        kept,
    ]


def what_a_group_says_of_itself() -> list[Any]:
    """Names, descriptions and numbers."""
    group: Any = dist.group.WORLD
    described: Any = dist.new_group(group_desc="mine")
    plain: Any = dist.new_group()
    before = group._get_sequence_number_for_group()
    dist.all_reduce(mine(2))
    dist.reduce_scatter(torch.empty(2), [mine(2)] * group.size())
    dist.monitored_barrier()
    (dist.send if group.rank() == 0 else dist.recv)(mine(2), 1 - group.rank())
    issued = group._get_sequence_number_for_group() - before
    numbers = [plain._get_sequence_number_for_group(), issued]
    return [group.group_desc, described.group_desc, plain.group_desc, group.name(), group._has_hooks(), numbers]


def keys_of_a_store() -> list[bytes]:
    """A rank waits for what another writes into the group's store, and into that of the world."""
    _runs.count = _runs.__dict__.get("count", 0) + 1
    group: Any = dist.group.WORLD
    found = []
    for number, store in enumerate((group.get_group_store(), dist.distributed_c10d._get_default_store())):
        key = f"key {_runs.count} {number}"
        if dist.get_rank() == 1:
            store.set(key, "value")
        store.wait([key], timedelta(seconds=5))
        found.append(store.get(key))
    return found


def group_of_a_named_backend() -> tuple[list[float], str]:
    """A group of gloo's, as programs make for checkpoints."""
    group = dist.new_group(backend="gloo")
    tensor = mine(2)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist(), dist.get_backend(group)


PROGRAMS: tuple[Program, ...] = (
    lists_of_several_tensors,
    barrier_completes_what_was_issued,
    barrier_handle_completes_what_was_issued,
    gather_into_an_output,
    sparse_sum,
    sparse_gradients,
    joined,
    hooks_that_wait,
    defaults_of_a_group,
    what_a_group_says_of_itself,
    keys_of_a_store,
    group_of_a_named_backend,
)


# Calls that are refused. Each has tensors of the right number of elements that do not go together.

OTHER_SHAPES = ((4,), (1, 4), (2, 2, 1), (1, 2, 2))
"""Shapes with as many elements as a tensor of 2 x 2 has."""
OTHER_WHOLES = ((8,), (2, 2, 2), (2, 4))
"""Shapes with as many elements as two of them."""


def part(shape: tuple[int, ...] = (2, 2)) -> torch.Tensor:
    """One of ones."""
    return torch.ones(shape)


def refused(calls: list[Program]) -> list[str]:
    """What each call raises; empty where it is taken."""
    found = []
    for call in calls:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")
    return found


def lists_of_other_shapes() -> list[str]:
    """Calls with lists."""
    calls: list[Program] = []
    for shape in OTHER_SHAPES:
        calls += [
            lambda shape=shape: dist.all_gather([part(shape), part(shape)], part()),
            lambda shape=shape: dist.all_gather_coalesced([[part(shape)], [part(shape)]], [part()]),
            lambda shape=shape: dist.reduce_scatter(part(shape), [part(), part()]),
        ]
    return refused(calls)


def lists_of_other_shapes_to_all() -> list[str]:
    """Calls that gloo has in later versions only."""
    calls: list[Program] = []
    for shape in OTHER_SHAPES:
        calls += [
            lambda shape=shape: dist.all_to_all([part(shape), part(shape)], [part(), part()]),
            lambda shape=shape: dist.all_to_all([part(), part(shape)], [part(), part(shape)]),
        ]
    return refused(calls)


def wholes_of_other_shapes() -> list[str]:
    """Calls with the parts of all ranks in one tensor."""
    group: Any = dist.group.WORLD
    calls: list[Program] = []
    for shape in OTHER_WHOLES:
        calls += [
            lambda shape=shape: dist.all_gather_into_tensor(part(shape), part()),
            lambda shape=shape: dist.reduce_scatter_tensor(part(), part(shape)),
            lambda shape=shape: group.allgather_into_tensor_coalesced([part(shape)], [part()]).wait(),
            lambda shape=shape: group.reduce_scatter_tensor_coalesced([part()], [part(shape)]).wait(),
        ]
    return refused([*calls, lambda: dist.all_gather_into_tensor(part((2,)), torch.tensor(1.0))])


def lists_of_other_numbers() -> list[str]:
    """Calls with more or fewer tensors, or of other types."""
    group: Any = dist.group.WORLD
    double = part().double()
    return refused(
        [
            lambda: dist.reduce_scatter(part(), [part()] * 3),
            lambda: group.allreduce([part(), part((3,))]).wait(),
            lambda: group.allreduce([]).wait(),
            lambda: group.allreduce_coalesced([part(), double]).wait(),
            lambda: group.allreduce_coalesced([]).wait(),
            lambda: group.allgather([[double, double]], [part()]).wait(),
            lambda: group.reduce([part(), part()]).wait(),
            lambda: group.broadcast([part(), part((3,))]).wait(),
            lambda: group.reduce_scatter([part()], [[double, double]]).wait(),
            lambda: dist.all_reduce(part(), op=dist._make_nccl_premul_sum(2.0)),
        ]
    )


def sparse_tensors() -> list[str]:
    """Sparse tensors in calls that do not add them up."""
    sparse = part().to_sparse()
    return refused(
        [
            lambda: dist.all_reduce(sparse, op=dist.ReduceOp.MAX),
            lambda: dist.all_reduce(sparse.bool()),
            lambda: dist.all_reduce(part().to_sparse_csr()),
            lambda: dist.broadcast(sparse, 0),
            lambda: dist.all_gather([sparse, sparse], sparse),
            lambda: dist.reduce(sparse, 0),
            lambda: dist.all_reduce_coalesced([sparse]),
        ]
    )


REFUSED: tuple[Program, ...] = (lists_of_other_shapes, wholes_of_other_shapes, lists_of_other_numbers, sparse_tensors)
