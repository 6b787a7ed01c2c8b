"""Finds out why no step of the single-device run changes a parameter."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from equivcheck.user.ranks import build_model
from equivcheck.user.reference import trace_of
from equivcheck.user.task import Task
from equivcheck.user.traces.optimizers import has_hooks, optimizers_in

NO_UPDATE = "no step changes a parameter, so a wrong update cannot show"
"""Reason why agreement proves nothing if all updates are zero."""
OTHER_PARAMETERS = "your optimizer has none of the model's parameters. Build it over the list that `optimizer` is called with"
NO_STEP = "your optimizer never stepped. Does your `step` call optimizer.step()?"
NO_GRADIENT = "no parameter had a gradient when your optimizer stepped. Does your `step` call backward before optimizer.step()?"
NO_RATE = "the learning rate is 0"


def reason_for_no_update(task: Task) -> str:
    """Train once more on one device, and return the reason why no parameter changes."""
    model = build_model(task)
    watched = _WatchedSteps(model)
    watching = task.with_new_optimizers(lambda built: watched.follow([each for each in optimizers_in(built) if has_hooks(each)]))
    trace_of(watching, seed=task.seed, model=model)
    return ": ".join(filter(None, (NO_UPDATE, watched.why())))


class _WatchedSteps:
    """Records gradients and learning rates at optimizer steps."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = set(model.parameters())
        self._optimizers: list[Optimizer] = []
        self._num_steps = 0
        self._had_gradient = False
        self._rates: set[float] = set()

    def follow(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        for each in optimizers:
            each.register_step_pre_hook(lambda optimizer, *_: self._read(optimizer))

    def why(self) -> str:
        """Return a clause that says why no parameter changes; empty if the reason is unknown."""
        held = {parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]}
        if self._optimizers and not held & self._parameters:
            return OTHER_PARAMETERS
        if not self._num_steps:
            return NO_STEP
        if not self._had_gradient:
            return NO_GRADIENT
        return NO_RATE if self._rates == {0.0} else ""

    def _read(self, optimizer: Optimizer) -> None:
        self._num_steps += 1
        for group in optimizer.param_groups:
            self._rates.add(float(group.get("lr", 1.0)))
            self._had_gradient |= any(parameter.grad is not None for parameter in group["params"])
