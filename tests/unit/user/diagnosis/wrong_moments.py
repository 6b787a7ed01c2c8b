"""Trainings in which code runs at wrong moments: averages of weights, `zero_grad`, clipping; and wrong reported numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unit.user.diagnosis.wrong_parts import unwrapped
from unit.user.diagnosis.wrong_shards import local, sharded
from unit.user.diagnosis.wrong_trainings import (
    MAX_NORM,
    Wrong,
    averaged,
    by_hand,
    clip,
    clipping_step,
    nothing,
    on_rank,
    step_of,
    two_microbatches,
)
from unit.user.diagnosis.wrong_updates import Averaged, average_after, average_before, keep_average
from unit.user.programs import adam, batches, brought


def averages(says: str, rank_step: Any, **changes: Any) -> Wrong:
    """A training with an average of a weight, kept at wrong moments on ranks."""
    given = {"model": Averaged, "parallelize": unwrapped, "step": average_after, "rank_step": rank_step}
    return Wrong(says=says, brought=brought(**given | changes))


def average_in_microbatches(model: nn.Module, *arguments: Any) -> Any:
    """Average in each microbatch."""
    own = step_of(after_each=lambda _, number: number or keep_average(model), after_update=lambda *_: keep_average(model))
    return own(model, *arguments)


def average_twice(model: nn.Module, *arguments: Any) -> Any:
    """Average twice after the update."""
    return step_of(after_update=lambda *_: (keep_average(model), keep_average(model)))(model, *arguments)


def adam_with_average(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam, with an average of the first parameter."""
    own: Any = adam(parameters)
    own.average = parameters[0].detach().clone()
    return own


def move_average(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Move the average to the first parameter."""
    optimizer.average.lerp_(parameters[0].detach(), 0.1)


def outside(says: str, rank_step: Any) -> Wrong:
    """A training with an average outside the model, kept at wrong moments on ranks."""
    given = {
        "optimizer": adam_with_average,
        "also": lambda _model, optimizer: {"average": {"0.weight": optimizer.average}},
        "step": step_of(reduce=nothing, after_update=move_average),
    }
    return Wrong(says=says, brought=brought(parallelize=unwrapped, rank_step=rank_step, **given))


class Pair(nn.Module):
    """Two models, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 2), nn.Linear(2, 1)


class TwoOptimizers:
    """An optimizer for each model in a pair."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.generator, self.critic = torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)


def in_turns(*, clears: Callable[[Any, int], bool]) -> Callable[..., Any]:
    """A step with a backward pass for each model. `clears` gets an optimizer and the number of the pass."""

    def step(model: Pair, batch: Any, optimizers: TwoOptimizers, _loss: Any) -> Any:
        both, value = (optimizers.critic, optimizers.generator), torch.zeros(())
        for number, optimizer in enumerate(both):
            for each in both:
                if clears(each, number):
                    each.zero_grad()
            made = model.generator(batch[0])
            value = nn.functional.softplus(model.critic(made.detach() if not number else made)).mean()
            value = value + nn.functional.softplus(-model.critic(batch[1])).mean() * (1 - number)
            value.backward()
            if dist.is_initialized():
                averaged([parameter for group in optimizer.param_groups for parameter in group["params"]])
            optimizer.step()
        return value.detach()

    return step


def returned(norm: Callable[[nn.Module], torch.Tensor], *, name: str = "") -> Callable[..., Any]:
    """A step that returns a gradient norm, or a dict with it."""

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        found = norm(model)
        optimizer.step()
        return {"loss": value.detach(), name: found} if name else found

    return step


def returned_metric(*, summed: bool) -> Callable[..., Any]:
    """A step that returns a metric of its own rows, or the sum over ranks."""

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        metric = value.detach().clone()
        if summed and dist.is_initialized():
            dist.all_reduce(metric)
        return {"loss": value.detach(), "metric": metric}

    return step


def squares(model: nn.Module) -> torch.Tensor:
    """The sum of squares over a rank's gradient elements."""
    return sum((local(parameter.grad).square().sum() for parameter in model.parameters()), torch.zeros(()))


def over_ranks(model: nn.Module) -> torch.Tensor:
    """The norm over all ranks' elements, replicas included."""
    total = squares(model)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


def sum_of_norms(model: nn.Module) -> torch.Tensor:
    """The sum over ranks of the norm of a rank's elements."""
    norm = squares(model).sqrt()
    if dist.is_initialized():
        dist.all_reduce(norm)
    return norm


def clip_values(parameters: list[torch.Tensor]) -> None:
    """Clip each element."""
    nn.utils.clip_grad_value_(parameters, MAX_NORM)


def clip_scaled(parameters: list[torch.Tensor]) -> None:
    """Clip gradients of a scaled loss, then unscale them."""
    for parameter in parameters:
        parameter.grad *= 128
    clip(parameters)
    for parameter in parameters:
        parameter.grad /= 128


class FrozenLayer(nn.Sequential):
    """A model with a frozen first layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self[0].requires_grad_(False)


def unfrozen(model: nn.Module, _mesh: Any) -> nn.Module:
    """Train all parameters."""
    return model.requires_grad_(True)


def rows_kept(model: nn.Module, _mesh: Any) -> nn.Module:
    """Keep each rank's part of the gradient for two rows."""
    share = torch.tensor([1.0, 0.25, 0.25, 1.0, 1.0, 1.0] if dist.get_rank() else [1.0, 0.75, 0.75, 1.0, 1.0, 1.0])
    model[0].weight.register_hook(lambda gradient: gradient * share[:, None].to(gradient.dtype))
    return model


def never(_optimizer: Any, number: int) -> bool:
    """Clear before the second pass only."""
    return number == 1


def always(_optimizer: Any, _number: int) -> bool:
    """Clear before each pass."""
    return True


clears_all = in_turns(clears=always)
"""The step of one device."""
MOMENTS: dict[str, Wrong] = {
    "average_in_microbatches": averages(
        "the running average `average` is updated after each microbatch, not after each update",
        average_in_microbatches,
        batches=two_microbatches(),
    ),
    "average_before_the_update": averages("the running average `average` is updated before the optimizer's", average_before),
    "average_twice": averages("the running average `average` is updated 2 times after each update", average_twice),
    "average_outside_before_the_update": outside(
        "the running average `0.weight/average` is updated before the optimizer's update, not after it",
        step_of(before_update=move_average),
    ),
    "average_outside_on_rank_0": outside(
        "the running average `0.weight/average` is never updated on rank 1", step_of(after_update=on_rank(0, move_average))
    ),
    "average_never": averages("the running average `average` is never updated", step_of()),
    "first_zero_grad_forgotten": Wrong(
        says="gradients are not zeroed at the first `zero_grad` of each step",
        brought=brought(
            model=Pair,
            parallelize=unwrapped,
            batches=[(rows, targets) for rows, targets in batches(4)],
            optimizer=TwoOptimizers,
            step=clears_all,
            rank_step=in_turns(clears=never),
        ),
        step=1,
    ),
    "norm_of_replicas": Wrong(
        says="your step returns a gradient norm that counts replicated elements once on each of the 2 tp ranks",
        brought=brought(mesh={"tp": 2}, parallelize=unwrapped, step=returned(over_ranks)),
    ),
    "reported_norm_of_replicas": Wrong(
        says="your step returns a value `grad_norm` that counts replicated elements once on each of the 2 tp ranks",
        brought=brought(mesh={"tp": 2}, parallelize=unwrapped, step=returned(over_ranks, name="grad_norm")),
    ),
    "norm_of_a_shard": Wrong(
        says="a gradient norm that covers only the elements on the rank",
        brought=brought(parallelize=sharded, step=returned(lambda model: squares(model).sqrt())),
    ),
    "norms_added_up": Wrong(
        says="a gradient norm that adds up the norms of the 2 dp ranks, not their squares",
        brought=brought(parallelize=sharded, step=returned(sum_of_norms)),
    ),
    "clipped_by_value": by_hand(
        "gradients are clipped by value, to 0.05, not by their norm", clips=clip_values, of_one=clipping_step
    ),
    "clipped_in_microbatches": by_hand(
        "gradients are clipped after each microbatch, not once per step",
        reduce=nothing,
        after_each=lambda parameters, _: clip(parameters),
        of_one=clipping_step,
        changes={"batches": two_microbatches(), "mesh": {"tp": 2}},
    ),
    "clipped_scaled": by_hand(
        "gradients of a loss that is scaled by 128 are clipped before they are unscaled", clips=clip_scaled, of_one=clipping_step
    ),
    "frozen_layer_trained": by_hand(
        "`0.weight` and `0.bias` are frozen on one device, but trained on your ranks",
        changes={"model": FrozenLayer, "parallelize": unfrozen},
    ),
    "metric_summed": Wrong(
        says="your step returns a value `metric` that is 2 times as large as on one device, the number of dp ranks",
        brought=brought(step=returned_metric(summed=True)),
    ),
    "metric_of_own_rows": Wrong(
        says="your step returns a value `metric` that is not averaged over the 2 dp ranks: each rank returns its own part",
        brought=brought(step=returned_metric(summed=False)),
    ),
    "rows_not_summed": Wrong(
        says="the gradients of rows 1 to 2 of `0.weight` are not summed over the 2 tp ranks: each rank keeps its own part",
        brought=brought(mesh={"tp": 2}, parallelize=rows_kept),
        step=0,
    ),
}
"""Mistakes in the moment, or in the elements that a norm covers."""
