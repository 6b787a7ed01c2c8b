"""What ranks do to differentiate collectives. Importable, so that ranks that are processes find it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
from torch.distributed import _functional_collectives as functional

from collectives.cases import CONCATENATED, Case, Kind, inputs_of
from collectives.gradient_memory import Memory, memory_of
from collectives.gradients import Derivative, Form, Waiting, output_of, weights_of
from collectives.programs import Result, Tensors, arrays_of, group_of, noted, tensor_of


def _named(*names: str) -> Any:
    """A functional collective by the first of its names that this torch has."""
    return next((getattr(functional, name) for name in names if hasattr(functional, name)), None)


gather_single = _named("all_gather_single", "all_gather_tensor")
scatter_single = _named("reduce_scatter_single", "reduce_scatter_tensor")
gather_coalesced = _named("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
scatter_coalesced = _named("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
gather_autograd = _named("all_gather_single_autograd", "all_gather_tensor_autograd")
scatter_autograd = _named("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")


def differentiate(derivatives: Sequence[Derivative]) -> list[tuple[Result, Result] | None]:
    """For each derivative what came out, and the gradient of each input; None where the caller is no member."""
    return [_differentiate(derivative, noted) for derivative in derivatives]


def differentiate_or_raise(derivative: Derivative) -> tuple[Result, Result] | None:
    """The same of one, but that what a rank raises ends the run of all ranks."""
    return _differentiate(derivative, contextlib.nullcontext)


def _differentiate(
    derivative: Derivative, noted: Callable[[Result], contextlib.AbstractContextManager[Any]]
) -> tuple[Result, Result] | None:
    case = derivative.case
    group = group_of(case.group)
    if dist.get_rank() not in case.group:
        return None
    member = case.group.index(dist.get_rank())
    inputs = [tensor_of(array, case.dtype).requires_grad_() for array in inputs_of(case, member)]
    values, gradients = Result(), Result()
    with noted(values):
        outputs = COMPUTE[derivative.form](derivative, group, member, _lying(derivative, member, inputs))
        outputs = [[_waited(derivative.waiting, tensor) for tensor in tensors] for tensors in outputs]
        _lay_gradients(derivative, member, outputs)
        parts = [_parts(derivative, member, tensors) for tensors in outputs]
        if derivative.waiting is not Waiting.AFTER_BACKWARD:
            values.outputs = _values(derivative, member, parts)
    if not values.error:
        with noted(gradients):
            _backward(derivative, member, parts)
            gradients.outputs = arrays_of(
                [torch.full_like(given, torch.nan) if given.grad is None else given.grad for given in inputs]
            )
            if derivative.waiting is Waiting.AFTER_BACKWARD:
                values.outputs = _values(derivative, member, parts)
    return values, gradients


def _values(derivative: Derivative, member: int, parts: list[Tensors]) -> list[Any]:
    """What a member received; of a gather, the others have zeros, which stand for nothing."""
    hidden = derivative.case.kind is Kind.GATHER and member != derivative.case.root
    return [] if hidden else arrays_of(parts[0])


def _lying(derivative: Derivative, member: int, inputs: Tensors) -> Tensors:
    """What is given to the collective: inputs, or one tensor of them, as they are to lie in memory."""
    whole = [_joined(derivative.case, inputs, derivative.dim)] if derivative.case.kind in CONCATENATED else inputs
    return [laid_out(tensor, memory_of(derivative.inputs, member, index)) for index, tensor in enumerate(whole)]


def laid_out(tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
    """The same tensor in another order in memory; it can be differentiated."""
    if memory is Memory.REVERSED:
        dims = tuple(reversed(range(tensor.dim())))
        return tensor.permute(dims).contiguous().permute(dims)
    if memory is Memory.GAPS and tensor.dim():
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if memory is Memory.EXPANDED and tensor.numel():
        return tensor.flatten()[0].clone().expand(tensor.shape)
    return tensor


def _lay_gradients(derivative: Derivative, member: int, outputs: list[Tensors]) -> None:
    """Have the gradient of each output that has one lie in memory as it is to."""
    for index, tensors in enumerate(outputs):
        for place, tensor in enumerate(tensors[:1] if derivative.unused else tensors):
            memory = memory_of(derivative.gradients, member, output_of(derivative, index, place))
            if tensor.requires_grad and memory is not Memory.ROWS:
                tensor.register_hook(functools.partial(laid_out, memory=memory))


def _waited(waiting: Waiting, tensor: torch.Tensor) -> torch.Tensor:
    if waiting is Waiting.BY_METHOD:
        return tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor
    return functional.wait_tensor(tensor) if waiting is Waiting.BY_FUNCTION else tensor


def _parts(derivative: Derivative, member: int, tensors: Tensors) -> Tensors:
    """The parts of an output that are somebody's each."""
    shapes = derivative.case.received_shapes(member)
    if len(shapes) == len(tensors):
        return tensors
    return list(tensors[0].split([shape[derivative.dim] for shape in shapes], derivative.dim))


def _backward(derivative: Derivative, member: int, outputs: list[Tensors]) -> None:
    """From the weights of all outputs, but of those that are not used."""
    pairs = [
        (tensor, tensor_of(weight, derivative.case.dtype))
        for tensors, weights in zip(outputs, weights_of(derivative, member), strict=True)
        for tensor, weight in zip(tensors, weights, strict=True)
    ]
    tensors, weights = zip(*(pairs[:1] if derivative.unused else pairs), strict=True)
    torch.autograd.backward(tensors, weights)


def _joined(case: Case, inputs: Tensors, dim: int = 0) -> torch.Tensor:
    return torch.cat(inputs, dim) if case.kind in CONCATENATED and len(inputs) > 1 else inputs[0]


def _sizes(case: Case, member: int) -> tuple[list[int], list[int]]:
    """Rows that a member receives from each, and sends to each."""
    members = range(len(case.group))
    return [case.part_shape(sender, member)[0] for sender in members], [case.part_shape(member, to)[0] for to in members]


def _blanks(case: Case, member: int) -> Tensors:
    return [torch.zeros(shape, dtype=getattr(torch, case.dtype)) for shape in case.received_shapes(member)]


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
        Kind.ALL_TO_ALL_SINGLE: lambda: nn.all_to_all_single(
            torch.cat(_blanks(case, member)), inputs[0], *_sizes(case, member), group
        ),
    }
    found = calls[case.kind]()
    return [list(found) if isinstance(found, tuple) else [found]]


def _functional(derivative: Derivative, group: Any, member: int, inputs: Tensors) -> list[Tensors]:
    case, dim, (whole,) = derivative.case, derivative.dim, inputs
    calls: dict[Kind, Callable[[], torch.Tensor]] = {
        Kind.BROADCAST: lambda: functional.broadcast(whole, case.root, group),
        Kind.ALL_REDUCE: lambda: functional.all_reduce(whole, case.op, group),
        Kind.REDUCE_SCATTER_SINGLE: lambda: scatter_single(whole, case.op, dim, group),
        Kind.ALL_GATHER_SINGLE: lambda: gather_single(whole, dim, group),
        Kind.ALL_TO_ALL_SINGLE: lambda: functional.all_to_all_single(whole, *_sizes(case, member), group),
    }
    return [[calls[case.kind]()]]


def _autograd(derivative: Derivative, group: Any, member: int, inputs: Tensors) -> list[Tensors]:
    case, dim, (whole,) = derivative.case, derivative.dim, inputs
    if case.kind is Kind.REDUCE_SCATTER_SINGLE:
        return [[scatter_autograd(whole, case.op, dim, group)]]
    if case.kind is Kind.ALL_GATHER_SINGLE:
        return [[gather_autograd(whole, dim, group)]]
    return [[functional.all_to_all_single_autograd(whole, *_sizes(case, member), group)]]


def _in_place(derivative: Derivative, group: Any, member: int, inputs: Tensors) -> list[Tensors]:
    case, blanks = derivative.case, _blanks(derivative.case, member)
    calls: dict[Kind, Callable[[], Any]] = {
        Kind.ALL_REDUCE: lambda: functional.all_reduce_inplace(inputs[0] * 1, case.op, group),
        Kind.REDUCE_SCATTER: lambda: functional.reduce_scatter_inplace(blanks[0], inputs, case.op, group),
        Kind.REDUCE_SCATTER_SINGLE: lambda: functional.reduce_scatter_tensor_inplace(blanks[0], inputs[0], case.op, group),
        Kind.ALL_GATHER: lambda: functional.all_gather_inplace(blanks, inputs[0], group),
        Kind.ALL_GATHER_SINGLE: lambda: functional.all_gather_tensor_inplace(torch.cat(blanks), inputs[0], group),
        Kind.ALL_TO_ALL_SINGLE: lambda: functional.all_to_all_inplace(torch.cat(blanks), inputs[0], *_sizes(case, member), group),
    }
    found = calls[case.kind]()
    return [found if isinstance(found, list) else [found]]


def _permute(derivative: Derivative, group: Any, _: int, inputs: Tensors) -> list[Tensors]:
    """To whom each has rows to send; to itself, and so to nobody else, where there are none."""
    rows = derivative.case.rows
    receivers = [next((to for to, count in enumerate(theirs) if count), sender) for sender, theirs in enumerate(rows)]
    return [[functional.permute_tensor(inputs[0], receivers, group)]]


def _coalesced(derivative: Derivative, group: Any, _: int, inputs: Tensors) -> list[Tensors]:
    case, both = derivative.case, [inputs[0], 2 * inputs[0]]
    if case.kind is Kind.ALL_REDUCE:
        found = functional.all_reduce_coalesced(both, case.op, group)
    elif case.kind is Kind.REDUCE_SCATTER_SINGLE:
        found = scatter_coalesced(both, case.op, [0, 0], group)
    else:
        found = gather_coalesced(both, group)
    return [[output] for output in found]


def _context_parallel(derivative: Derivative, group: Any, _: int, inputs: Tensors) -> list[Tensors]:
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    found = flex_cp_allgather(inputs[0], 2 * inputs[0], derivative.dim, group.group_name)
    return [[output] for output in found]


COMPUTE: dict[Form, Callable[[Derivative, Any, int, Tensors], list[Tensors]]] = {
    Form.NN: _nn,
    Form.FUNCTIONAL: _functional,
    Form.AUTOGRAD: _autograd,
    Form.IN_PLACE: _in_place,
    Form.PERMUTE: _permute,
    Form.COALESCED: _coalesced,
    Form.CONTEXT_PARALLEL: _context_parallel,
}
"""Each gives the outputs of each tensor that goes in."""


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


def _into(name: str, *options: Any, rows: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """An operator of functional collectives that is given two rows for each rank, and an output where it has so many rows."""

    def call(given: torch.Tensor) -> torch.Tensor:
        operator, out = getattr(torch.ops._c10d_functional, name), {"out": given.new_zeros(rows)} if rows else {}
        found = operator(given, *options, dist.group.WORLD.group_name, **out)
        return functional.wait_tensor(found[0] if isinstance(found, list) else found)

    return call


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce_": lambda given: _into("all_reduce_", "sum")(given * 1),
    "all_reduce_coalesced_": lambda given: functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_coalesced_([given * 1], "sum", dist.group.WORLD.group_name)[0]
    ),
    "broadcast_": lambda given: _into("broadcast_", 1)(given * 1),
    "reduce_scatter_tensor_out": _into("reduce_scatter_tensor_out", "sum", 2, rows=1),
    "shard_dim_alltoall": lambda given: torch.ops._dtensor.shard_dim_alltoall(
        given.view(1, 2), 0, 1, dist.group.WORLD.group_name
    ),
}
"""Operators behind functional collectives and DTensor that no function with a backward calls."""
OPERATORS_SINCE = {"reduce_scatter_tensor_out": ">=2.11"}
"""The versions of torch that one is tried in: 2.9 has none, and in 2.10 its gradient over gloo is that of the rank's own part."""


def differentiate_operator(name: str) -> list[float] | None:
    """The gradient of twice the sum of what an operator gives on rank 0, and of the sum on rank 1; None if it has none."""
    given = torch.ones(2, requires_grad=True)
    found = OPERATORS[name](given)
    if not found.requires_grad:
        return None
    (gradient,) = torch.autograd.grad((2 - dist.get_rank()) * found.sum(), given, allow_unused=True)
    return None if gradient is None else gradient.tolist()
