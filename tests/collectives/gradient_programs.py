"""What ranks do to differentiate collectives. Importable, so that ranks that are processes find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
from torch.distributed import _functional_collectives as functional

from collectives.cases import CONCATENATED, Case, Kind, inputs_of
from collectives.gradients import Derivative, Form, weights_of
from collectives.programs import Result, Tensors, arrays_of, group_of, noted, tensor_of

gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def differentiate(derivatives: Sequence[Derivative]) -> list[tuple[Result, Result] | None]:
    """For each derivative what came out, and the gradient of each input; None where the caller is no member."""
    return [_differentiate(derivative) for derivative in derivatives]


def _differentiate(derivative: Derivative) -> tuple[Result, Result] | None:
    case = derivative.case
    group = group_of(case.group)
    if dist.get_rank() not in case.group:
        return None
    member = case.group.index(dist.get_rank())
    inputs = [tensor_of(array, case.dtype).requires_grad_() for array in inputs_of(case, member)]
    values, gradients = Result(), Result()
    with noted(values):
        outputs = COMPUTE[derivative.form](derivative, group, member, inputs)
        hidden = case.kind is Kind.GATHER and member != case.root  # zeros, which stand for nothing
        values.outputs = [] if hidden else arrays_of(outputs[0])
    if not values.error:
        with noted(gradients):
            _backward(derivative, member, outputs)
            gradients.outputs = arrays_of(
                [torch.full_like(given, torch.nan) if given.grad is None else given.grad for given in inputs]
            )
    return values, gradients


def _backward(derivative: Derivative, member: int, outputs: list[Tensors]) -> None:
    """Of the weighted sum of all outputs of all tensors; a gather gives what it gathers to the root only."""
    loss = torch.zeros((), dtype=torch.float64)
    for tensors, weights in zip(outputs, weights_of(derivative, member), strict=True):
        for tensor, weight in zip(tensors, weights, strict=True):
            loss = loss + (tensor * tensor_of(weight, derivative.case.dtype)).sum()
    loss.backward()


def _joined(case: Case, inputs: Tensors, dim: int = 0) -> torch.Tensor:
    return torch.cat(inputs, dim) if case.kind in CONCATENATED and len(inputs) > 1 else inputs[0]


def _sizes(tensors: Tensors) -> list[int]:
    return [len(tensor) for tensor in tensors]


def _blanks(case: Case, member: int) -> Tensors:
    return [torch.zeros(case.part_shape(sender, member), dtype=getattr(torch, case.dtype)) for sender in range(len(case.group))]


def _nn(derivative: Derivative, group: Any, member: int, inputs: Tensors) -> list[Tensors]:
    case, root = derivative.case, derivative.case.group[derivative.case.root]
    op = getattr(dist.ReduceOp, case.op.upper(), None)
    calls: dict[Kind, Callable[[], Any]] = {
        Kind.BROADCAST: lambda: nn.broadcast(inputs[0], root, group),
        Kind.ALL_REDUCE: lambda: nn.all_reduce(inputs[0], op, group),
        Kind.REDUCE: lambda: nn.reduce(inputs[0], root, op, group),
        Kind.REDUCE_SCATTER: lambda: nn.reduce_scatter(_blanks(case, member)[0], inputs, op, group),
        Kind.ALL_GATHER: lambda: nn.all_gather(inputs[0], group),
        Kind.GATHER: lambda: nn.gather(inputs[0], root, group),
        Kind.SCATTER: lambda: nn.scatter(inputs, root, group),
        Kind.ALL_TO_ALL: lambda: nn.all_to_all(_blanks(case, member), inputs, group),
        Kind.ALL_TO_ALL_SINGLE: lambda: _nn_all_to_all_single(case, group, member, inputs),
    }
    found = calls[case.kind]()
    return [list(found) if isinstance(found, tuple) else [found]]


def _nn_all_to_all_single(case: Case, group: Any, member: int, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    blanks = _blanks(case, member)
    sizes = _sizes(blanks)
    return nn.all_to_all_single(torch.cat(blanks), torch.cat(inputs), sizes, _sizes(inputs), group).split(sizes)


def _functional(derivative: Derivative, group: Any, member: int, inputs: Tensors) -> list[Tensors]:
    case, dim = derivative.case, derivative.dim
    whole = _joined(case, inputs, dim)
    if case.kind is Kind.BROADCAST:
        return [[functional.broadcast(whole, case.root, group)]]
    if case.kind is Kind.ALL_REDUCE:
        return [[functional.all_reduce(whole, case.op, group)]]
    if case.kind is Kind.REDUCE_SCATTER_SINGLE:
        return [[scatter_single(whole, case.op, dim, group)]]
    if case.kind is Kind.ALL_GATHER_SINGLE:
        return [list(gather_single(whole, dim, group).split([case.shape[dim]] * len(case.group), dim))]
    sizes = _sizes(_blanks(case, member))
    return [list(functional.all_to_all_single(whole, sizes, _sizes(inputs), group).split(sizes))]


def _coalesced(derivative: Derivative, group: Any, _: int, inputs: Tensors) -> list[Tensors]:
    case = derivative.case
    whole = _joined(case, inputs)
    both = [whole, 2 * whole]
    if case.kind is Kind.ALL_REDUCE:
        found = functional.all_reduce_coalesced(both, case.op, group)
    elif case.kind is Kind.REDUCE_SCATTER_SINGLE:
        found = functional.reduce_scatter_tensor_coalesced(both, case.op, [0, 0], group)
    else:
        found = functional.all_gather_into_tensor_coalesced(both, group)
        return [list(output.split([case.shape[0]] * len(case.group))) for output in found]
    return [[output] for output in found]


COMPUTE: dict[Form, Callable[[Derivative, Any, int, Tensors], list[Tensors]]] = {
    Form.NN: _nn,
    Form.FUNCTIONAL: _functional,
    Form.COALESCED: _coalesced,
}


def differentiate_all_gather_base() -> str:
    """What the backward of ``nn._all_gather_base`` says."""
    gathered = nn._all_gather_base(torch.zeros(2 * dist.get_world_size()), torch.ones(2, requires_grad=True))
    try:
        gathered.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def unpack_saved_maximum() -> str:
    """What autograd says of what a coalesced maximum has saved for its backward; rank 1 issues it when rank 0 has."""
    token = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(token, 0)
    given = [torch.ones(2, requires_grad=True)]
    found = torch.ops._c10d_functional.all_reduce_coalesced(given, "max", dist.group.WORLD.group_name)[0]
    if dist.get_rank() == 0:
        dist.send(token, 1)
    functional.wait_tensor(found)
    try:
        return "" if found.grad_fn.saved_tensors else "nothing was saved"
    except RuntimeError as error:
        return str(error)
