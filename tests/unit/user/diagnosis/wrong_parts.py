"""Trainings in which some parameters, microbatches, terms of the loss or steps are wrong, and others right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unit.user.diagnosis.wrong_trainings import (
    MAX_NORM,
    Wrong,
    averaged,
    by_hand,
    nothing,
    on_ranks,
    rank,
    sgd,
    step_of,
    two_microbatches,
)
from unit.user.programs import adam, batches, brought


def three_microbatches() -> list[Any]:
    """Steps with three microbatches, four rows each."""
    return [[tuple(part) for part in zip(*(each.chunk(3) for each in batch), strict=True)] for batch in batches(12)]


def parts_kept(shares: Mapping[int, float], model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps a share of the first gradient along one axis."""
    model[0].weight.register_hook(lambda gradient: gradient * shares[mesh.get_local_rank("tp")])
    return model


def scaled_loss(factor: float) -> Callable[..., Any]:
    """A rank's step with a factor at the loss."""

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        return step_of()(model, batch, optimizer, lambda outputs, targets: factor * loss(outputs, targets))

    return step


def at_first(act: Callable[[torch.Tensor], object], parameters: list[torch.Tensor], number: int) -> None:
    """Change the first parameter's gradient after the first microbatch."""
    if number == 0:
        act(parameters[0].grad)


def sum_each(parameters: list[torch.Tensor], _number: int) -> None:
    """Sum the accumulated gradients over ranks."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)


def halve(parameters: list[torch.Tensor]) -> None:
    """Divide by the number of ranks."""
    for parameter in parameters:
        parameter.grad /= dist.get_world_size()


def squares(model: nn.Module) -> torch.Tensor:
    """The penalty, in one sum."""
    return model[0].weight.square().sum()


def squares_one_by_one(model: nn.Module) -> torch.Tensor:
    """The penalty, in many additions."""
    first, *others = model[0].weight.square().flatten()
    return sum(others, first)


def with_penalty(factor: float, penalty_of: Callable[[nn.Module], torch.Tensor] = squares) -> Callable[..., Any]:
    """A step whose loss has a second term."""

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        optimizer.zero_grad()
        penalty = 0.1 * penalty_of(model)
        value = loss(model(batch[0]), batch[1]) + penalty * (factor if dist.is_initialized() else 1.0)
        value.backward()
        if dist.is_initialized():
            averaged(list(model.parameters()))
        optimizer.step()
        return value

    return step


class GradientTimes(torch.autograd.Function):
    """The same value, with a multiple of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def penalty_gradient_doubled(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
    """A step whose second term has twice its gradient on ranks."""
    optimizer.zero_grad()
    penalty = 0.1 * squares(model)
    if dist.is_initialized():
        penalty = GradientTimes.apply(penalty, 2.0)
    value = loss(model(batch[0]), batch[1]) + penalty
    value.backward()
    if dist.is_initialized():
        averaged(list(model.parameters()))
    optimizer.step()
    return value


class Exchanged:
    """Exchange the momentum of both biases of one shape before the second step."""

    def __init__(self) -> None:
        self.seen = dict[int, int]()

    def __call__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Count the step and exchange."""
        self.seen[rank()] = self.seen.get(rank(), -1) + 1
        if self.seen[rank()] == 1:
            state, (one, other) = optimizer.state, parameters[1:3]
            state[one], state[other] = state[other], state[one]


class Halving:
    """Halve the learning rate a number of times after each step."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Halve."""
        for group in optimizer.param_groups:
            group["lr"] *= 0.5**self.times


def doubled_in_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Double the rate for the update."""
    optimizer.param_groups[0]["lr"] = 0.02


def back_after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Reset the rate."""
    optimizer.param_groups[0]["lr"] = 0.01


def in_bfloat16(parameters: list[torch.Tensor], number: int) -> None:
    """Round the gradients accumulated so far."""
    for parameter in parameters:
        parameter.grad.copy_(parameter.grad.bfloat16())


def clipped_by_norm(factor: float, parameters: list[torch.Tensor]) -> None:
    """Clip in two calls."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm * factor)


def weighted(weights: tuple[float, ...]) -> Callable[..., Any]:
    """A step whose microbatches have weights, which change from step to step."""

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        optimizer.zero_grad()
        total, own = 0.0, [weight + float(batch[0][0][0, 0] > 0) for weight in weights]
        for weight, (inputs, targets) in zip(own, batch, strict=True):
            value = loss(model(inputs), targets) * weight / sum(own)
            value.backward()
            total += float(value.detach())
        if dist.is_initialized():
            averaged(list(model.parameters()))
        optimizer.step()
        return total

    return step


def chunked(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
    """Run three backward passes without a division."""
    optimizer.zero_grad()
    values = []
    for inputs, targets in zip(*(each.chunk(3) for each in batch), strict=True):
        values.append(loss(model(inputs), targets))
        values[-1].backward()
    optimizer.step()
    return sum(each.detach() for each in values) / 3


def update_each(weight: float, *, zeroes: bool) -> Callable[..., Any]:
    """A rank's step that updates after each microbatch."""

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in batch:
            value = loss(model(inputs), targets)
            (weight * value).backward()
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
            total += float(value.detach()) / len(batch)
        return total

    return step


def unwrapped(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Leave the model unchanged."""
    return model


class FirstRowKept(torch.optim.SGD):
    """SGD that never updates the first row on ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update, then put the row back."""
        first = self.param_groups[0]["params"][0]
        row = first[0].clone()
        value = super().step(closure)
        if dist.is_initialized():
            first[0] = row
        return value


class Twice(nn.Module):
    """A model that uses one weight in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 8)), nn.Linear(4, 2)
        self.stage: int | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A stage gets gradients only through its own use of the weight."""
        first, last = (self.weight if self.stage in (None, each) else self.weight.detach() for each in (0, 1))
        return self.head(torch.tanh(inputs @ first) @ last.T)


def staged(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Give each rank its stage."""
    model.stage = mesh.get_local_rank("pp")
    return model


def embedding_summed(
    *, scattered: bool, num_rows: int = 4, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> Callable[..., Any]:
    """A step that sums the shared weight's gradient over stages.

    If `scattered`, each data rank averaged only its own rows before that, and each row is updated by its owner. The first stage
    keeps `num_rows` rows on data rank 1, and the last stage on data rank 0, as Megatron-LM did (#844).
    `change` changes the sum.
    """

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any, mesh: DeviceMesh | None = None) -> Any:
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        if mesh is None:
            optimizer.step()
            return value.detach()
        dp, pp, weight = mesh.get_group("dp"), mesh.get_group("pp"), model.weight
        averaged([*model.head.parameters()], dp)
        mean = weight.grad.clone()
        dist.all_reduce(mean, group=dp)
        is_first = torch.arange(4) < num_rows
        owned = is_first if dp.rank() != pp.rank() else ~is_first
        weight.grad[owned if scattered else slice(None)] = (mean / 2)[owned if scattered else slice(None)]
        dist.all_reduce(weight.grad, group=pp)
        weight.grad = change(weight.grad)
        optimizer.step()
        if scattered:
            with torch.no_grad():
                weight[~owned] = 0.0
                dist.all_reduce(weight, group=dp)
        return value.detach()

    return step


PARTS: dict[str, Wrong] = {
    "shared_weight_scattered_first": Wrong(
        says="the gradient of `weight` is reduced over a part of the ranks only (with the sum over the 2 pp ranks of the "
        "gradients after backward, averaged over the 2 dp ranks, your ranks agree with one device in every step)",
        brought=brought(
            model=Twice, parallelize=staged, mesh={"dp": 2, "pp": 2}, step=embedding_summed(scattered=True), optimizer=sgd
        ),
        step=0,
    ),
    "shared_weight_scattered_by_rows": Wrong(
        says="the gradient of `weight` is reduced over a part of the ranks only",
        brought=brought(
            model=Twice,
            parallelize=staged,
            mesh={"dp": 2, "pp": 2},
            step=embedding_summed(scattered=True, num_rows=2),
            optimizer=sgd,
        ),
        step=0,
    ),
    "parts_kept": Wrong(
        says="the gradient of `0.weight` is not summed over the 2 tp ranks: each rank keeps its own part",
        brought=brought(mesh={"tp": 2}, parallelize=partial(parts_kept, {0: 0.25, 1: 0.75})),
        step=0,
    ),
    "parts_of_a_mean_kept": Wrong(
        says="the gradient of `0.weight` is not averaged over the 2 tp ranks",
        brought=brought(mesh={"tp": 2}, parallelize=partial(parts_kept, {0: 0.5, 1: 1.5})),
        step=0,
    ),
    "loss_times_ranks": Wrong(
        says="2 times as large as on one device, the number of dp ranks or of tp ranks",
        brought=brought(mesh={"dp": 2, "tp": 2}, parallelize=unwrapped, rank_step=scaled_loss(2.0)),
    ),
    "loss_divided": Wrong(
        says="the loss and all gradients are 0.5 times as large as on one device, one over the number of dp ranks",
        brought=brought(parallelize=unwrapped, rank_step=scaled_loss(0.5)),
    ),
    "loss_scaled": Wrong(
        says="the loss and all gradients are 1.25 times as large as on one device",
        brought=brought(parallelize=unwrapped, rank_step=scaled_loss(1.25)),
    ),
    "overwritten": by_hand(
        "the gradient of `0.weight` is from microbatch 1 (the last) only, weighted by its share",
        after_each=partial(at_first, torch.Tensor.zero_),
        changes={"batches": two_microbatches()},
    ),
    "added_twice": by_hand(
        "the gradient of `0.weight` is accumulated with microbatch 0 (the first) added twice",
        after_each=partial(at_first, lambda gradient: gradient.mul_(2)),
        changes={"batches": three_microbatches()},
    ),
    "reduced_again": by_hand(
        "the accumulated gradient is summed over the 2 dp ranks again after each microbatch",
        after_each=sum_each,
        reduce=halve,
        changes={"batches": three_microbatches()},
    ),
    "penalty_of_each_rank": Wrong(
        says="* (factor if dist.is_initialized() else 1.0)` (wrong_parts.py:",
        brought=brought(parallelize=unwrapped, step=with_penalty(1.0), rank_step=with_penalty(2.0)),
    ),
    "penalty_scaled": Wrong(
        says=") is multiplied by 1.5",
        brought=brought(parallelize=unwrapped, step=with_penalty(1.0), rank_step=with_penalty(1.5)),
    ),
    "penalty_in_many_additions": Wrong(
        says="* (factor if dist.is_initialized() else 1.0)` (wrong_parts.py:",
        brought=brought(
            parallelize=unwrapped,
            step=with_penalty(1.0, squares_one_by_one),
            rank_step=with_penalty(2.0, squares_one_by_one),
        ),
    ),
    "penalty_lost": Wrong(
        says=") is missing",
        brought=brought(parallelize=unwrapped, step=with_penalty(1.0), rank_step=with_penalty(0.0)),
    ),
    "penalty_gradient": Wrong(
        says="the gradient of the second term in `value = loss(model(batch[0]), batch[1]) + penalty` (wrong_parts.py:",
        brought=brought(parallelize=unwrapped, step=penalty_gradient_doubled, rank_step=penalty_gradient_doubled),
    ),
    "states_exchanged": by_hand(
        "the optimizer states of `0.bias` and `2.weight` are exchanged before step 1",
        first=1,
        before_update=Exchanged(),
        changes={"optimizer": sgd},
    ),
    "schedule_twice": by_hand(
        "at step 1, lr is 0.0025, not 0.005: the schedule advances 2 times per step, the number of dp ranks",
        after_update=Halving(2),
        of_one=step_of(reduce=nothing, after_update=Halving(1)),
    ),
    "schedule_early": by_hand(
        "at step 0, lr is 0.005, not 0.01: the schedule is one step ahead",
        before_update=Halving(1),
        of_one=step_of(reduce=nothing, after_update=Halving(1)),
    ),
    "rate_in_step": by_hand(
        "at step 0, lr is 0.02, not 0.01",
        before_update=doubled_in_step,
        after_update=back_after_step,
    ),
    "accumulated_in_bfloat16": by_hand(
        "gradients are accumulated in bfloat16", after_each=in_bfloat16, changes={"batches": three_microbatches()}
    ),
    "clipped_in_two_calls": by_hand(
        "counts gradients replicated over the 2 dp ranks once per rank",
        clips=partial(clipped_by_norm, 2**0.5),
        of_one=step_of(reduce=nothing, clips=partial(clipped_by_norm, 1.0)),
    ),
    "microbatch_weights": Wrong(
        says="microbatches have other weights in loss and gradients than on one device: at step 0, microbatch 0 counts",
        brought=brought(
            mesh={"tp": 2},
            batches=three_microbatches(),
            parallelize=unwrapped,
            step=weighted((1.0, 1.0, 1.0)),
            rank_step=weighted((1.0, 2.0, 3.0)),
        ),
    ),
    "amsgrad_forgotten": by_hand(
        "at step 0, amsgrad is False, not True",
        changes={"optimizer": on_ranks(adam, partial(torch.optim.Adam, lr=0.01, amsgrad=True))},
    ),
    "decay_coupled": by_hand(
        "at step 0, decoupled_weight_decay is False, not True",
        changes={
            "optimizer": on_ranks(
                partial(torch.optim.Adam, lr=0.01, weight_decay=0.1), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
            )
        },
    ),
    "rows_of_nobody": Wrong(
        says="the optimizer does not update row 0 of `0.weight`",
        brought=brought(optimizer=partial(FirstRowKept, lr=0.1)),
        step=0,
    ),
    "updated_each_microbatch": Wrong(
        says="the optimizer steps after each microbatch, not once after all",
        brought=brought(
            mesh={"tp": 2}, parallelize=unwrapped, batches=three_microbatches(), rank_step=update_each(1, zeroes=True)
        ),
        step=0,
    ),
    "updated_each_microbatch_by_sums": Wrong(
        says="the optimizer steps after each microbatch, not once after all, with the gradients accumulated so far",
        brought=brought(
            mesh={"tp": 2}, parallelize=unwrapped, batches=three_microbatches(), rank_step=update_each(1 / 3, zeroes=False)
        ),
        step=0,
    ),
    "not_divided_by_chunks": Wrong(
        says="all gradients are 3 times as large as on one device, the number of backward passes in a rank's step",
        brought=brought(mesh={"tp": 2}, batches=batches(6), parallelize=unwrapped, rank_step=chunked),
    ),
    "chunks_or_ranks": Wrong(
        says="all gradients are multiplied by 3, the number of tp ranks or of backward passes in a rank's step",
        brought=brought(mesh={"tp": 3}, batches=batches(6), parallelize=unwrapped, rank_step=chunked),
    ),
}
"""Mistakes in a part of a training."""
