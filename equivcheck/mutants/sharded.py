"""Shards of parameters, gradients and optimizer state that are treated wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from equivcheck.mutants.axes import axis_names, mesh_of, stepped
from equivcheck.mutants.torch_private import ReduceScatter, forget_replicas, send_nothing
from equivcheck.scenario import Training
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.trace.stage import Stage
from equivcheck.train.read import State
from equivcheck.train.setup import Setup


def sum_up(setup: Setup) -> None:
    """Let reductions divide by nothing."""
    for module in _units(setup):
        module.set_gradient_divide_factor(1.0)


def reduce_nothing(setup: Setup) -> None:
    """Let each rank take its chunk of its own gradients."""
    for module in _units(setup):
        module.set_custom_reduce_scatter(_Kept())


def shift_chunks(setup: Setup) -> None:
    """Let each rank take the chunk of the next one."""
    for module in _units(setup):
        module.set_custom_reduce_scatter(_Shifted())


def leave_replicas_apart(setup: Setup) -> None:
    """Reduce over shards, and not over replicas."""
    if REPLICATE in axis_names(setup):
        for module in _units(setup):
            forget_replicas(module, mesh_of(setup)[SHARD])


def gather_once(setup: Setup) -> None:
    """Keep what the last backward of a step has gathered, whatever the optimizer then does to its shards."""
    accumulation = setup.accumulation

    def keeping(last: bool) -> AbstractContextManager[object]:
        for module in _units(setup):
            module.set_reshard_after_backward(not last)
        return accumulation(last)

    setup.accumulation = keeping


def _units(setup: Setup) -> Iterator[FSDPModule]:
    return (module for module in setup.model.modules() if isinstance(module, FSDPModule))


class _Kept(ReduceScatter):
    """Hands over the rank's own chunk, scaled as a mean over ranks would be."""

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # type: ignore[override]
        """A buffer of the size that is asked for."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002 - as it is called
    ) -> None:
        """What arrives at this rank."""
        chunks = input_tensor.view(group.size(), -1)
        output_tensor.copy_(chunks[group.rank()] * (1 if op == dist.ReduceOp.AVG else group.size()))


class _Shifted(_Kept):
    """Reduces rightly, but hands over the chunk of the next rank."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002 - as it is called
    ) -> None:
        """What arrives at this rank."""
        chunks = input_tensor.view(group.size(), -1).roll(-1, 0)
        dist.reduce_scatter_tensor(output_tensor, chunks.reshape(-1), op=op, group=group)


def keep_tail(setup: Setup) -> None:
    """Never update the rows of a shard that is shorter than others, as its end is padding."""
    update = setup.update

    def but_tails(optimizer: torch.optim.Optimizer) -> None:
        tails = [local for parameter in stepped(optimizer) if (local := _tail(parameter)) is not None]
        before = [local.clone() for local in tails]
        update(optimizer)
        with torch.no_grad():
            for local, values in zip(tails, before, strict=True):
                local.copy_(values)

    setup.update = but_tails


def _tail(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's shard, where it is neither empty nor as long as the first."""
    if not isinstance(parameter, DTensor) or not any(isinstance(placement, Shard) for placement in parameter.placements):
        return None
    local: torch.Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    axis = next(axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard))
    whole, count = parameter.shape[0], parameter.device_mesh.size(axis)
    return local if 0 < local.shape[0] < -(-whole // count) else None


def optimize_others(setup: Setup) -> None:
    """Build the optimizer over copies of the parameters, as one built before wrapping has them."""
    build = setup.build_optimizer

    def build_for_copies(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return build(training, [(name, _copy(parameter)) for name, parameter in parameters])

    setup.build_optimizer = build_for_copies


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)


def lose_state(setup: Setup) -> None:
    """Forget the optimizer's state before each step."""
    state_of = setup.state_of

    def forget(optimizer: torch.optim.Optimizer, _index: int) -> None:
        state_of(optimizer).clear()  # type: ignore[attr-defined]

    setup.before_step.append(forget)


def pass_state_on(setup: Setup) -> None:
    """Give each rank the optimizer state of the next one along the shards, once, before its second step."""
    seen: list[int] = []

    def exchange(optimizer: torch.optim.Optimizer, index: int) -> None:
        seen.append(index)
        if len(seen) == 2:
            setup.announce(Stage.READING, index)
            for values in _sharded_state(setup.state_of(optimizer), stepped(optimizer)):
                _take_from_next(setup, values)
            setup.announce(Stage.COMPUTE, index)

    setup.before_step.append(exchange)


def _sharded_state(state: State, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        entries: Mapping[str, Any] = state.get(parameter, {})
        for value in entries.values():
            if isinstance(value, DTensor) and value.shape == parameter.shape:
                yield value.to_local()


def _take_from_next(setup: Setup, values: torch.Tensor) -> None:
    """Overwrite values by those of the next rank along the shards, as many as there are."""
    for axis in set(axis_names(setup)) & {DP, SHARD}:
        group = mesh_of(setup).get_group(axis)
        longest = torch.tensor([values.numel()])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
        padded = torch.zeros(int(longest), dtype=values.dtype)
        padded[: values.numel()] = values.reshape(-1)
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        with torch.no_grad():
            values.copy_(parts[(group.rank() + 1) % group.size()][: values.numel()].view(values.shape))


def compute_on_old(setup: Setup) -> None:
    """Let each step compute on the parameters that the step before started from."""
    compute, earlier = setup.compute, list[list[torch.Tensor]]()

    def on_old(altered: Setup, microbatches: Any, index: int) -> float | None:
        held = [_local(slot.parameter) for slot in altered.find_slots(altered.model)]
        now = [values.clone() for values in held]
        _overwrite(held, earlier[-1] if earlier else now)
        earlier[:] = [now]
        loss = compute(altered, microbatches, index)
        _overwrite([_local(slot.parameter) for slot in altered.find_slots(altered.model)], now)
        return loss

    setup.compute = on_old


def _overwrite(held: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, new in zip(held, values, strict=True):
            tensor.copy_(new)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = parameter.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def send_no_parameters(setup: Setup) -> None:
    """Let ranks keep to themselves the parameters that they have updated for all."""
    setup.before_training.append(lambda optimizer, _schedule: send_nothing(optimizer))
