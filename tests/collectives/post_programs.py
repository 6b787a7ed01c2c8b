"""What ranks do with messages, objects, barriers and coalesced calls. Importable, so that ranks that are processes find it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from collectives.cases import Case, Kind, inputs_of
from collectives.model import Array
from collectives.posts import Barrier, Coalesced, Form, Post
from collectives.programs import (
    Result,
    Tensors,
    all_gather_single,
    array_of,
    arrays_of,
    group_of,
    noted,
    reduce_scatter_single,
    tensor_of,
)


def deliver(post: Sequence[Post]) -> list[dict[int, Array]]:
    """For each post what the caller received, by index of the message."""
    return [_deliver(each) for each in post]


def _deliver(post: Post) -> dict[int, Array]:
    ranks = post.messages[0].group
    group = group_of(ranks)
    if dist.get_rank() not in ranks:
        return {}
    member = ranks.index(dist.get_rank())
    sent = {i: _letter(case) for i, case in enumerate(post.messages) if case.root == member}
    received = {i: torch.zeros_like(_letter(post.messages[i])) for i in post.order if post.receivers[i] == member}
    FORMS[post.form](post, group, sent, received)
    return {index: array_of(tensor) for index, tensor in received.items()}


def _letter(case: Case) -> torch.Tensor:
    return tensor_of(inputs_of(case, case.root)[0], case.dtype)


def _blocking(post: Post, group: Any, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
    ranks = post.messages[0].group
    for index, message in enumerate(post.messages):
        if index in sent:
            dist.send(sent[index], ranks[post.receivers[index]], group=group, tag=post.tags[index])
        if index in received:
            source = dist.recv(received[index], ranks[message.root], group=group, tag=post.tags[index])
            assert source == ranks[message.root]


def _handles(post: Post, group: Any, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
    ranks = post.messages[0].group
    works = [dist.isend(sent[i], ranks[post.receivers[i]], group=group, tag=post.tags[i]) for i in sent]
    works += [dist.irecv(received[i], ranks[post.messages[i].root], group=group, tag=post.tags[i]) for i in received]
    for work in reversed(works):
        work.wait()


def _batch(post: Post, group: Any, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
    ranks = post.messages[0].group
    ops = [dist.P2POp(dist.irecv, received[i], ranks[post.messages[i].root], group, post.tags[i]) for i in received]
    ops += [dist.P2POp(dist.isend, sent[i], ranks[post.receivers[i]], group, post.tags[i]) for i in sent]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


FORMS = {Form.BLOCKING: _blocking, Form.HANDLES: _handles, Form.BATCH: _batch}


def run_coalesced(batch: Sequence[Coalesced]) -> list[list[Result | None]]:
    """For each coalesced call the results of its parts; None where the caller is no member."""
    return [_run_coalesced(each) for each in batch]


def _run_coalesced(each: Coalesced) -> list[Result | None]:
    group = group_of(each.cases[0].group)
    if dist.get_rank() not in each.cases[0].group:
        return [None] * len(each.cases)
    member = each.cases[0].group.index(dist.get_rank())
    inputs = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (_parts(case, member) for case in each.cases)]
    result, outputs = Result(), []
    with noted(result):
        outputs = (_functional if each.functional else _managed)(each, group, inputs)
    if result.error:
        return [result] * len(each.cases)
    size = len(each.cases[0].group)
    whole = each.cases[0].kind is not Kind.ALL_GATHER_SINGLE
    return [Result(outputs=arrays_of([output] if whole else _split(output, size))) for output in outputs]


def _split(gathered: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(gathered.chunk(size)) if len(gathered) else [gathered] * size


def _parts(case: Case, member: int) -> Tensors:
    return [tensor_of(array, case.dtype) for array in inputs_of(case, member)]


def _functional(each: Coalesced, group: Any, inputs: Tensors) -> Tensors:
    case = each.cases[0]
    if case.kind is Kind.ALL_REDUCE:
        outputs = functional.all_reduce_coalesced(inputs, case.op, group)
    elif case.kind is Kind.ALL_GATHER_SINGLE:
        outputs = functional.all_gather_into_tensor_coalesced(inputs, group)
    else:
        outputs = functional.reduce_scatter_tensor_coalesced(inputs, case.op, [0] * len(inputs), group)
    return [functional.wait_tensor(output) for output in outputs]


def _managed(each: Coalesced, group: Any, inputs: Tensors) -> Tensors:
    case, size = each.cases[0], len(each.cases[0].group)
    op = getattr(dist.ReduceOp, case.op.upper(), None)
    outputs = inputs
    with dist._coalescing_manager(group, async_ops=each.asynchronous) as works:
        if case.kind is Kind.ALL_REDUCE:
            for tensor in inputs:
                dist.all_reduce(tensor, op=op, group=group)
        elif case.kind is Kind.ALL_GATHER_SINGLE:
            outputs = [torch.zeros_like(torch.cat([tensor] * size)) for tensor in inputs]
            for output, tensor in zip(outputs, inputs, strict=True):
                all_gather_single(output, tensor, group=group)
        else:
            outputs = [torch.zeros_like(tensor[: len(tensor) // size]) for tensor in inputs]
            for output, tensor in zip(outputs, inputs, strict=True):
                reduce_scatter_single(output, tensor, op=op, group=group)
    if each.asynchronous:
        works.wait()
    return outputs


def exchange_objects(ranks: Sequence[int], root: int, objects: Sequence[Any]) -> dict[str, Any] | None:
    """Every object collective, with `objects[i]` as what member i has; `root` is a rank within the group."""
    group = group_of(ranks)
    if dist.get_rank() not in ranks:
        return None
    member, size, source = ranks.index(dist.get_rank()), len(ranks), ranks[root]
    mine = (objects[member], torch.full((member,), float(member)))
    all_gathered: list[Any] = [None] * size
    dist.all_gather_object(all_gathered, mine, group=group)
    gathered = [None] * size if member == root else None
    dist.gather_object(mine, gathered, dst=source, group=group)
    told = [objects[member], "and", mine] if member == root else [None] * 3
    dist.broadcast_object_list(told, src=source, group=group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(objects) if member == root else None, src=source, group=group)
    found = {"all_gathered": all_gathered, "gathered": gathered, "told": told, "scattered": scattered[0]}
    return {**found, "passed": _pass_on(objects, ranks, member, group)}


def _pass_on(objects: Sequence[Any], ranks: Sequence[int], member: int, group: Any) -> Any:
    """Each member hands its object to the next; the first sends first."""
    if len(ranks) == 1:
        return None
    got = [None]
    if member:
        dist.recv_object_list(got, src=ranks[member - 1], group=group)
    dist.send_object_list([objects[member]], dst=ranks[(member + 1) % len(ranks)], group=group)
    if not member:
        dist.recv_object_list(got, src=ranks[-1], group=group)
    return got[0]


def meet(ranks: Sequence[int], delays: Sequence[float], barrier: Barrier) -> tuple[float, float] | None:
    """When the caller came to a barrier, after its delay in seconds, and when it left, by a clock that all share."""
    group = group_of(ranks)
    if dist.get_rank() not in ranks:
        return None
    time.sleep(delays[ranks.index(dist.get_rank())])
    came = time.monotonic()
    if barrier is Barrier.MONITORED:
        dist.monitored_barrier(group)
    else:
        work = dist.barrier(group=group, async_op=barrier is Barrier.ASYNCHRONOUS)
        if work is not None:
            work.wait()
    return came, time.monotonic()
