"""Optimizers with wrong settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import torch

from equivcheck.layouts.composition.registry import rounds
from equivcheck.mutants.mutant import ONE_RANK, TWO_STEPS, Minimum, fault, register
from equivcheck.mutants.needs import EVERYWHERE, all_of, is_eager, updates_exceed_rounding
from equivcheck.mutants.rank import mesh_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import SGD, Adam, AdamW, NAdam, Precision, RAdam, RMSprop, Rprop, Scenario, Training
from equivcheck.training.setup import Setup

Change = Callable[[Training], Training]


def _has_decay(training: Training) -> bool:
    return training.optimizer.weight_decay > 0.0 or any(group.weight_decay > 0.0 for group in training.groups)


def _decays(scenario: Scenario) -> bool:
    return not isinstance(scenario.training.optimizer, Rprop) and _has_decay(scenario.training)


def _has_digits_of_float64(scenario: Scenario) -> bool:
    """Whether float64 is kept throughout. In float32, 1e-6 next to a gradient near 1 is rounding."""
    return scenario.training.precision is Precision.FLOAT64 and not rounds(scenario.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptimizer:
    """Plants a fault in a setup: its optimizer is built for a changed training."""

    change: Change
    """Function that changes the training; importable by name."""

    def __call__(self, setup: Setup) -> None:
        """Replace the setup's optimizer."""
        build = setup.build_optimizer

        def build_other(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
            return build(self.change(training), parameters)

        setup.build_optimizer = build_other


def _settings(
    *,
    causes: tuple[Cause, ...],
    minimum: Minimum = ONE_RANK,
    applies: Callable[[Scenario], bool] = lambda _scenario: True,
) -> Callable[[Change], Change]:
    """Decorator that registers a change to the training as a mutant. Ranks build their optimizer from the changed training."""

    def register_change(change: Change) -> Change:
        register(
            change,
            plant=ChangeOptimizer(change=change),
            layouts=EVERYWHERE,
            applies=all_of(
                is_eager, updates_exceed_rounding, lambda scenario: change(scenario.training) != scenario.training, applies
            ),
            causes=causes,
            minimum=minimum,
        )
        return change

    return register_change


@_settings(causes=(Cause.DECAY_EVERYWHERE, Cause.HYPERPARAMETER))
def decay_on_groups_without(training: Training) -> Training:
    """Bug: weight decay is applied to parameter groups without weight decay."""
    decay = training.optimizer.weight_decay
    return replace(training, groups=tuple(replace(group, weight_decay=group.weight_decay or decay) for group in training.groups))


@_settings(causes=(Cause.DECAY_COUPLED,))
def decay_coupled(training: Training) -> Training:
    """Bug: weight decay is coupled to gradients instead of decoupled, or vice versa."""
    optimizer = training.optimizer
    if not _has_decay(training):
        return training
    if isinstance(optimizer, (NAdam, RAdam)):
        return replace(training, optimizer=replace(optimizer, decoupled_weight_decay=not optimizer.decoupled_weight_decay))
    if isinstance(optimizer, Adam):
        other = Adam if isinstance(optimizer, AdamW) else AdamW
        return replace(training, optimizer=other(**{field.name: getattr(optimizer, field.name) for field in fields(optimizer)}))
    return training


@_settings(causes=(Cause.DECAY_TWICE, Cause.HYPERPARAMETER), applies=_decays)
def decay_twice(training: Training) -> Training:
    """Bug: weight decay is applied twice."""
    groups = tuple(replace(group, weight_decay=2.0 * group.weight_decay) for group in training.groups)
    optimizer = replace(training.optimizer, weight_decay=2.0 * training.optimizer.weight_decay)
    return replace(training, groups=groups, optimizer=optimizer)


@_settings(causes=(Cause.HYPERPARAMETER, Cause.DECAY_EVERYWHERE))
def groups_forgotten(training: Training) -> Training:
    """Bug: parameter groups are ignored, so all parameters use the default settings."""
    return replace(training, groups=())


@_settings(causes=(Cause.HYPERPARAMETER,))
def group_rates_forgotten(training: Training) -> Training:
    """Bug: each parameter group uses the optimizer's learning rate instead of its own."""
    return replace(training, groups=tuple(replace(group, lr_factor=1.0) for group in training.groups))


@_settings(causes=(Cause.HYPERPARAMETER,))
def beta2_lowered(training: Training) -> Training:
    """Bug: the average of squared gradients decays ten times faster, such as with beta2 0.99 instead of 0.999."""
    betas = getattr(training.optimizer, "betas", None)
    if betas is None:
        return training
    return _with(training, betas=(betas[0], round(max(0.0, 1.0 - 10.0 * (1.0 - betas[1])), 12)))


@_settings(causes=(Cause.HYPERPARAMETER,))
def betas_swapped(training: Training) -> Training:
    """Bug: the two betas are swapped."""
    betas = getattr(training.optimizer, "betas", None)
    return training if betas is None else _with(training, betas=betas[::-1])


@_settings(causes=(Cause.HYPERPARAMETER,), applies=_has_digits_of_float64)
def eps_enlarged(training: Training) -> Training:
    """Bug: denominators get a 100 times larger eps, such as 1e-6 instead of 1e-8."""
    eps = getattr(training.optimizer, "eps", None)
    return _with(training, eps=100.0 * eps) if isinstance(eps, float) else training


@_settings(causes=(Cause.HYPERPARAMETER,))
def amsgrad_forgotten(training: Training) -> Training:
    """Bug: `amsgrad` is off, so second moments may shrink."""
    return _with(training, amsgrad=False) if isinstance(training.optimizer, Adam) else training


@_settings(causes=(Cause.HYPERPARAMETER,))
def momentum_forgotten(training: Training) -> Training:
    """Bug: momentum is 0, so updates use the current gradient only."""
    optimizer = training.optimizer
    if isinstance(optimizer, SGD):
        return _with(training, momentum=0.0, dampening=0.0, nesterov=False)
    return _with(training, momentum=0.0) if isinstance(optimizer, RMSprop) else training


@_settings(causes=(Cause.HYPERPARAMETER,))
def nesterov_forgotten(training: Training) -> Training:
    """Bug: `nesterov` is off although the training sets it."""
    # Not Muon, because its first step differs by bfloat16 rounding only.
    return _with(training, nesterov=False) if isinstance(training.optimizer, SGD) else training


@_settings(
    causes=(Cause.HYPERPARAMETER,),
    minimum=TWO_STEPS,
)
def dampening_forgotten(training: Training) -> Training:
    """Bug: `dampening` is 0 although the training sets it."""
    return _with(training, dampening=0.0) if isinstance(training.optimizer, SGD) else training


@_settings(causes=(Cause.HYPERPARAMETER,))
def maximize_forgotten(training: Training) -> Training:
    """Bug: `maximize` is off, so the loss is minimized."""
    return _with(training, maximize=False)


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, updates_exceed_rounding), causes=(Cause.HYPERPARAMETER,))
def rate_scaled_by_ranks(setup: Setup) -> None:
    """Bug: the learning rate is multiplied by the number of ranks, although gradients are averaged."""
    factor, build = mesh_of(setup).size(), setup.build_optimizer

    def build_faster(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        optimizer = training.optimizer
        return build(replace(training, optimizer=replace(optimizer, lr=factor * optimizer.lr)), parameters)

    setup.build_optimizer = build_faster


def _with(training: Training, **changes: object) -> Training:
    return replace(training, optimizer=replace(training.optimizer, **changes))  # type: ignore[arg-type]
