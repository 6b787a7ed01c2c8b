"""Common mistakes in sharded trainings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unit.user.diagnosis.wrong_trainings import MAX_NORM, Wrong, by_hand, clipping_step, nothing, rank, sgd, step_of
from unit.user.diagnosis.wrong_updates import Counter
from unit.user.programs import adam, batches, brought


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2."""
    return fully_shard(model, mesh=mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fsdp(says: str, **parts: Any) -> Wrong:
    """An FSDP2 training with a mistake in one part."""
    changes = {"parallelize": sharded, "model": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))}
    given = changes | parts.pop("changes", {})
    return by_hand(says, changes=given, **({"reduce": nothing} | parts))


def scale(parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
    """Scale gradients by a norm, as clipping does."""
    for parameter in parameters:
        local(parameter.grad).mul_(min(1.0, MAX_NORM / (float(norm) + 1e-6)))


def by_own_norm(parameters: list[torch.Tensor]) -> None:
    """Clip by the shard's norm."""
    scale(parameters, nn.utils.get_total_norm([local(parameter.grad) for parameter in parameters]))


def clip_own(parameters: list[torch.Tensor]) -> None:
    """Clip by the own elements' norm, with torch's function."""
    norm = nn.utils.get_total_norm([local(parameter.grad) for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=False)  # some are DTensors, and others are not


def clip_by_twice_own(parameters: list[torch.Tensor]) -> None:
    """Clip by twice the own elements' norm, with torch's function."""
    norm = nn.utils.get_total_norm([local(parameter.grad) for parameter in parameters])
    norm *= 2
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=False)


def by_norm_of_rank_0(parameters: list[torch.Tensor]) -> None:
    """Clip by the norm of rank 0's shard, as a pipeline by that of its first stage."""
    norm = nn.utils.get_total_norm([local(parameter.grad) for parameter in parameters])
    dist.broadcast(norm, 0)
    scale(parameters, norm)


def by_doubled_squares(parameters: list[torch.Tensor]) -> None:
    """Clip by a norm whose squares are added up twice."""
    scale(parameters, nn.utils.get_total_norm([parameter.grad.full_tensor() for parameter in parameters for _ in range(2)]))


def rooted(parameters: list[torch.Tensor]) -> None:
    """Clip by the root of the maximum over ranks."""
    norm = torch.stack([local(parameter.grad).abs().max() for parameter in parameters if local(parameter.grad).numel()]).max()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    scale(parameters, norm**0.5)


def clip_max(parameters: list[torch.Tensor]) -> None:
    """Clip by the largest element, on one device."""
    nn.utils.clip_grad_norm_(parameters, MAX_NORM, norm_type=float("inf"))


class Lars(torch.optim.Optimizer):
    """A learning rate per tensor, from its norm and its gradient's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own, gradient = local(parameter), local(parameter.grad)
                own.sub_(gradient * (group["lr"] * own.norm() / (gradient.norm() + 1e-3)))


def another_shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Load the other rank's shard."""
    model = sharded(model, mesh)
    for parameter in model.parameters():
        parts = [torch.empty_like(local(parameter)) for _ in range(2)]
        dist.all_gather(parts, local(parameter).detach().clone())
        with torch.no_grad():
            local(parameter).copy_(parts[1 - rank()])
    return model


def reduced_again(parameters: list[torch.Tensor]) -> None:
    """Average local shards as if they were replicas."""
    for parameter in parameters:
        dist.all_reduce(local(parameter.grad))
        local(parameter.grad).div_(dist.get_world_size())


def another_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Continue with the other rank's optimizer state."""
    for parameter in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            kept = local(optimizer.state[parameter][key])
            parts = [torch.empty_like(kept) for _ in range(2)]
            dist.all_gather(parts, kept.clone())
            kept.copy_(parts[1 - rank()])


class GatheredEarly:
    """Each rank updates every other parameter, and gets the rest from before the update."""

    def __init__(self) -> None:
        self.old: dict[int, list[torch.Tensor]] = {}

    def before(self, _optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """Gather."""
        self.old[rank()] = [parameter.detach().clone() for parameter in parameters]
        for number, value in enumerate(self.old[rank()]):
            dist.broadcast(value, src=number % 2)

    def after(self, _optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """Use the gathered parameters."""
        for number, (parameter, old) in enumerate(zip(parameters, self.old[rank()], strict=True)):
            if number % 2 != rank():
                parameter.data.copy_(old)


def gathered_early() -> Wrong:
    """Arguments with `GatheredEarly`."""
    gathering = GatheredEarly()
    return by_hand("are from the previous step", before_update=gathering.before, after_update=gathering.after)


class Prefetched:
    """Compute with the head's weight from the previous step."""

    def __init__(self) -> None:
        self.old: dict[int, torch.Tensor] = {}
        self.fresh: dict[int, torch.Tensor] = {}

    def __call__(self, model: nn.Module, *arguments: Any) -> Any:
        """Swap, compute, swap back, update."""
        weight = model[3].weight
        self.fresh[rank()] = weight.detach().clone()
        weight.data.copy_(self.old.get(rank(), weight.detach()))
        self.old[rank()] = self.fresh[rank()]
        back = lambda _optimizer, _parameters: weight.data.copy_(self.fresh[rank()])  # noqa: E731
        return step_of(before_update=back)(model, *arguments)


class _Sum(torch.autograd.Function):
    """Sum over ranks in forward only."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Gather(torch.autograd.Function):
    """Concatenate all ranks' columns. In backward each rank takes its part."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        context.width = value.shape[-1]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[..., rank() * context.width : (rank() + 1) * context.width].contiguous()


def row_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A row-wise head whose bias every rank adds before the sum."""
    head = model[3]
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(1)]))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        part = _Whole.apply(inputs).chunk(2, -1)[rank()]
        return _Sum.apply(nn.functional.linear(part, local(head.weight), head.bias))

    head.forward = forward
    return model


class _Whole(torch.autograd.Function):
    """Identity in forward, sum over ranks in backward."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def column_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A column-wise head whose input gradient is not summed."""
    head = model[3]
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    head.forward = lambda inputs: _Gather.apply(nn.functional.linear(inputs, local(head.weight))) + head.bias
    return model


def state_of_first_elements(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Continue with the first elements of the full optimizer state, as if no rank had another part."""
    for parameter in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][key]
            if isinstance(state, DTensor):
                first = state.full_tensor().flatten()[: local(state).numel()]
                local(state).copy_(first.view_as(local(state)))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the first and the last layer."""
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(model, mesh["tp"], plan)


def sum_missing(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Column-wise, then row-wise without its reduction."""
    up, down = model[2], model[4]
    for linear, name, dim in ((up, "weight", 0), (up, "bias", 0), (down, "weight", 1)):
        setattr(linear, name, nn.Parameter(distribute_tensor(getattr(linear, name).detach(), mesh, [Shard(dim)])))
    up.forward = lambda inputs: nn.functional.linear(_Whole.apply(inputs), local(up.weight), local(up.bias))
    down.forward = lambda inputs: nn.functional.linear(inputs, local(down.weight), down.bias)
    return model


def columns_and_rows() -> nn.Module:
    """Column-wise and row-wise layers after a norm."""
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class _GatherRows(torch.autograd.Function):
    """Concatenate all ranks' rows. In backward each rank takes its part."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        context.rows = len(value)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[rank() * context.rows : (rank() + 1) * context.rows].contiguous()


class _Part(torch.autograd.Function):
    """Take this rank's rows. In backward concatenate the gradients."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.chunk(dist.get_world_size())[rank()].clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _GatherRows.apply(gradient)


def norm_of_own_rows(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Each rank normalizes some rows and keeps the weight's gradient."""
    norm = model[2]
    norm.forward = lambda inputs: _GatherRows.apply(
        nn.functional.layer_norm(_Part.apply(inputs), norm.normalized_shape, norm.weight, norm.bias)
    )
    return model


def summed_again(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Column-wise, then row-wise. Gradients of the layers before are complete, and summed again."""
    sum_missing(model, mesh)
    up_and_down = model[4].forward
    bias = model[4].bias
    model[4].forward = lambda inputs: _Sum.apply(up_and_down(inputs) - bias) + bias
    for parameter in (*model[0].parameters(), *model[1].parameters()):
        parameter.register_hook(_total)
    return model


def _total(gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total


class Halves(nn.Module):
    """A residual block. Each rank multiplies its own hidden features, whose gradients it does not give to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.first(inputs)
        hidden = torch.tanh(self.hidden(inputs))
        if not dist.is_initialized():
            return self.head(inputs + self.last(hidden))
        own = slice(3 * rank(), 3 * rank() + 3)
        part = nn.functional.linear(hidden[..., own], self.last.weight[:, own])
        return self.head(inputs + _Sum.apply(part) + self.last.bias)


def last_weight_summed(model: Halves, _mesh: DeviceMesh) -> nn.Module:
    """Sum the gradient of the last weight, of which each rank has a part."""
    model.last.weight.register_hook(_total)
    return model


class Normalized(nn.Module):
    """Inputs minus a running mean, which the next step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * inputs.detach().mean(0)
        return outputs


class Tracker(nn.Module):
    """A buffer with input statistics that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * inputs.detach().mean(0)
        return self.linear(inputs)


def uneven() -> list[Any]:
    """Steps with one microbatch of four rows and one of two."""
    return [[(inputs[:4], targets[:4]), (inputs[4:], targets[4:])] for inputs, targets in batches(6)]


def by_rows(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
    """A single-device step that weighs microbatches by rows."""
    optimizer.zero_grad()
    total, rows = 0.0, sum(len(inputs) for inputs, _ in batch)
    for inputs, targets in batch:
        value = loss(model(inputs), targets) * (len(inputs) / rows)
        value.backward()
        total += float(value.detach())
    optimizer.step()
    return total


def masked(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
    """Dropout with a mask drawn on each rank."""
    (inputs, mask), targets = batch
    if dist.is_initialized():
        mask = (torch.rand(mask.shape, generator=torch.Generator().manual_seed(rank())) > 0.5).to(mask.dtype)
    step = step_of() if dist.is_initialized() else step_of(reduce=nothing)
    return step(model, (inputs * mask, targets), optimizer, loss)


def masks() -> list[Any]:
    """Batches with masks."""
    generator = torch.Generator().manual_seed(5)
    return [((inputs, (torch.rand(inputs.shape, generator=generator) > 0.5).float()), targets) for inputs, targets in batches()]


IN_TP = {"mesh": {"tp": 2}}

SHARDS: dict[str, Wrong] = {
    "shard_norm": fsdp(
        "clips by its local norm",
        clips=by_own_norm,
        of_one=clipping_step,
    ),
    "replicas_clipped_apart": by_hand(
        "each rank clips by its local norm, over the elements that it holds (with the norm over all elements, your ranks agree",
        reduce=nothing,
        clips=clip_own,
        of_one=clipping_step,
        changes={"parallelize": tensor_parallel, "mesh": {"dp": 1, "tp": 2}},
    ),
    "replicas_clipped_by_another_norm": by_hand(
        "your ranks clip by another norm than one device (with the norm of one device, your ranks agree with one device",
        reduce=nothing,
        clips=clip_by_twice_own,
        of_one=clipping_step,
        changes={"parallelize": tensor_parallel, "mesh": {"dp": 1, "tp": 2}},
    ),
    "norm_of_rank_0": fsdp(
        "all ranks clip by the norm over the elements that rank 0 holds", clips=by_norm_of_rank_0, of_one=clipping_step
    ),
    "inf_norm_rooted": fsdp("the root of ", clips=rooted, of_one=step_of(reduce=nothing, clips=clip_max)),
    "shards_counted_twice": fsdp(
        "the total norm counts each gradient element once on each of the 2 dp ranks",
        clips=by_doubled_squares,
        of_one=clipping_step,
    ),
    "lars_on_a_shard": fsdp("treats each rank's shard as the full tensor", changes={"optimizer": Lars}),
    "wrong_shard_restored": fsdp("in wrong places", changes={"parallelize": another_shard}),
    "shards_averaged": fsdp(
        "all gradients are averaged over the 2 dp ranks, although each rank holds another shard", reduce=reduced_again
    ),
    "wrong_optimizer_shard": fsdp(
        "rank r has the optimizer state of rank r + 1 before step 1",
        before_update=Counter(1, another_state),
        changes={"optimizer": adam},
    ),
    "state_read_as_if_unsplit": by_hand(
        "each rank takes its optimizer state from the full state as if the 2 tp ranks did not split it, before step 1",
        reduce=nothing,
        before_update=Counter(1, state_of_first_elements),
        changes={"optimizer": adam, "parallelize": tensor_parallel, "mesh": {"dp": 1, "tp": 2}},
    ),
    "all_gather_stale": gathered_early(),
    "prefetched_stale_weight": Wrong(
        says="loss and gradients are computed with `3.weight` from the previous step",
        brought=brought(parallelize=lambda model, _mesh: model, rank_step=Prefetched(), optimizer=sgd),
    ),
    "row_bias": by_hand(
        "the bias of `3` is added on each of the 2 tp ranks",
        reduce=nothing,
        changes={"parallelize": row_parallel} | IN_TP,
    ),
    "head_reduction_missing": by_hand(
        "the gradient of the input of column-wise `3` is not summed",
        reduce=nothing,
        changes={"parallelize": column_parallel} | IN_TP,
    ),
    "sum_missing": by_hand(
        "the output of row-wise `4` is not summed over the 2 tp ranks",
        reduce=nothing,
        changes={"parallelize": sum_missing, "model": columns_and_rows} | IN_TP,
    ),
    "summed_again": by_hand(
        "and 2 more are multiplied by 2, the number of tp ranks",
        reduce=nothing,
        changes={"parallelize": summed_again, "model": columns_and_rows} | IN_TP,
    ),
    "output_gradient_partial": by_hand(
        "the output gradient of `hidden` is not summed over the 2 tp ranks: each rank continues with its own part (with this",
        reduce=nothing,
        changes={"parallelize": last_weight_summed, "model": Halves} | IN_TP,
    ),
    "norm_of_own_rows": by_hand(
        "the gradients of `2.weight` and `2.bias` are not summed over the 2 tp ranks: each rank keeps the gradient",
        reduce=nothing,
        changes={"parallelize": norm_of_own_rows} | IN_TP,
    ),
    "buffers_of_one_rank": by_hand(
        "each rank computes buffers from its own rows, and before each forward rank 0's buffers replace",
        reduce=nothing,
        first=0,
        changes={"model": Normalized, "parallelize": lambda model, _mesh: nn.parallel.DistributedDataParallel(model)},
    ),
    "batch_norm_in_ddp": by_hand(
        "and the results are averaged over ranks; each rank computes buffers from its own rows",
        reduce=nothing,
        first=0,
        changes={
            "model": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
            "parallelize": lambda model, _mesh: nn.parallel.DistributedDataParallel(model),
        },
    ),
    "buffers_unsynced": by_hand("buffers are left unreduced", changes={"model": Tracker}),
    "uneven_microbatches": by_hand("although they have different numbers of rows", of_one=by_rows, changes={"batches": uneven()}),
    "dropout_seed": Wrong(
        says="",
        brought=brought(parallelize=lambda model, _mesh: model, batches=masks(), step=masked),
    ),
}
"""Mistakes with shards, split layers, and others."""
