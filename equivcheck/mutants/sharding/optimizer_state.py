"""Optimizer state lost, swapped between ranks, or computed on shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equivcheck.layouts.base.plan.rules import splits_weights
from equivcheck.mutants.mutant import TWO_STEPS, Minimum, fault
from equivcheck.mutants.needs import all_of, has_optimizer_state, has_steps, updates_exceed_rounding
from equivcheck.mutants.rank import axis_names, mesh_of, optimizer_parameters
from equivcheck.mutants.sharding.reductions import FULLY_SHARDED, is_sharded, num_shards
from equivcheck.mutants.sharding.updates import OPTIMIZERS, is_not_resumed
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, SPMD, Adafactor, Distribution, Muon, Scenario, TensorParallel, Training, ZeroGrad
from equivcheck.scenario.mesh import DP, SHARD, TP
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.read import State, local_values
from equivcheck.training.setup import Setup
from equivcheck.training.update.optimizer import build_optimizer
from equivcheck.worlds.trace.stage import Stage


def _needs_whole(scenario: Scenario) -> bool:
    """Whether an optimizer needs full matrices, and computing on shards changes more than rounding does.

    With more than one step, Muon's bfloat16 iteration amplifies directions with tiny gradients, so rounding alone changes an
    update completely. Adafactor only takes means over rows and columns.
    """
    optimizer, parameters = scenario.training.optimizer, parameters_of(scenario.training.model)
    has_rows = any(len(each.shape) > 1 and each.shape[0] > 1 and each.trained for each in parameters)
    tells = isinstance(optimizer, Adafactor) or (isinstance(optimizer, Muon) and optimizer.ns_steps == 1)
    return _cuts_weights(scenario) and tells and has_rows


def _cuts_weights(scenario: Scenario) -> bool:
    """Whether ranks hold different shards of a weight, as DTensors."""
    return any(
        (isinstance(parallelism, SPMD) and parallelism.distribution is Distribution.FULLY_SHARD)
        or (isinstance(parallelism, FSDP2) and num_shards(scenario) > 1)
        or (isinstance(parallelism, TensorParallel) and scenario.layout.mesh.size(TP) > 1 and splits_weights(parallelism))
        for parallelism in scenario.layout.parallelisms
    )


@fault(
    layouts=OPTIMIZERS,
    applies=all_of(has_steps, has_optimizer_state, updates_exceed_rounding),
    causes=(Cause.STATE_LOST,),
    minimum=TWO_STEPS,
)
def state_lost(setup: Setup) -> None:
    """Bug: optimizer state is cleared before each step."""
    state_of = setup.state_of

    def forget(optimizer: torch.optim.Optimizer, _index: int) -> None:
        state_of(optimizer).clear()  # type: ignore[attr-defined]

    setup.before_step.append(forget)


@fault(
    layouts=FULLY_SHARDED,
    applies=all_of(has_steps, has_optimizer_state, is_sharded, updates_exceed_rounding),
    causes=(Cause.STATE_OF_ANOTHER, Cause.PERMUTED),
    minimum=Minimum(steps=2, because="it takes two shards, and the first step has no state yet"),
)
def state_of_another_rank(setup: Setup) -> None:
    """Bug: each rank continues with the next rank's optimizer-state shard, as if a resume had mixed up ranks."""
    seen: list[int] = []

    def exchange(optimizer: torch.optim.Optimizer, index: int) -> None:
        seen.append(index)
        if len(seen) == 2:
            setup.announce(Stage.READING, index)
            for values in _sharded_state(setup.state_of(optimizer), optimizer_parameters(optimizer)):
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
    """Overwrite values with the next rank's shard, as far as the shard reaches."""
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


@fault(
    layouts=("fsdp2", "tensor_parallel", "spmd", "fsdp2 x tensor_parallel"),
    applies=all_of(is_not_resumed, _needs_whole, updates_exceed_rounding),
    causes=(Cause.LOCAL_STATISTICS,),
)
def statistics_of_shards(setup: Setup) -> None:
    """Bug: an optimizer that needs full matrices gets shards."""
    shards = _Shards(setup)
    setup.build_optimizer, setup.update, setup.state_of = shards.build, shards.update, shards.state
    setup.before_step.append(shards.zero)


@dataclass(slots=True, eq=False)
class _Shards:
    setup: Setup
    """The rank's setup."""
    locals_of: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Each parameter's local tensor, which shares the parameter's memory."""

    def build(self, training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """Build an optimizer for local tensors."""
        pairs = list(parameters)
        self.locals_of = {parameter: _leaf(parameter) for _, parameter in pairs}
        return build_optimizer(training, [(name, self.locals_of[parameter]) for name, parameter in pairs])

    def zero(self, _optimizer: torch.optim.Optimizer, _index: int) -> None:
        """Zero the parameters' gradients, because the optimizer only knows local tensors."""
        for parameter in self.locals_of:
            if self.setup.training.zero_grad is ZeroGrad.NONE:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with local gradients; empty tensors get no gradient."""
        for parameter, local in self.locals_of.items():
            gradient = parameter.grad
            held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.grad = held if local.numel() else None
        optimizer.step()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return the optimizer state of the local tensors, by the parameter to which each local tensor belongs."""
        return {
            parameter: {key: _as_whole(parameter, local, value) for key, value in optimizer.state[local].items()}
            for parameter, local in self.locals_of.items()
            if local in optimizer.state
        }


def _leaf(parameter: torch.Tensor) -> torch.Tensor:
    return local_values(parameter).detach().requires_grad_(parameter.requires_grad)


def _as_whole(parameter: torch.Tensor, local: torch.Tensor, value: Any) -> Any:
    """Wrap a shard-sized state tensor as a DTensor with its parameter's placements."""
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == local.shape):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
