"""An optimizer that runs with other settings than those of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from equivcheck.composition.registry import rounding_of
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.places import EVERYWHERE, both, updates_tell
from equivcheck.scenario import SGD, Adam, AdamW, NAdam, Precision, RAdam, RMSprop, Rprop, Scenario, Training
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    import torch

    from equivcheck.train.setup import Setup

Change = Callable[[Training], Training]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOfAnother:
    """Builds the optimizer as if the training were another one."""

    change: Change
    """The other training; importable by its name."""

    def __call__(self, setup: Setup) -> None:
        """Build it from the other training."""
        build = setup.build_optimizer

        def build_other(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
            return build(self.change(training), parameters)

        setup.build_optimizer = build_other


def scale_rate_by_ranks(setup: Setup) -> None:
    """Multiply the learning rate by the number of ranks."""
    assert setup.mesh is not None, "a mutant is planted into a rank"
    factor, build = setup.mesh.size(), setup.build_optimizer

    def build_faster(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        optimizer = training.optimizer
        return build(replace(training, optimizer=replace(optimizer, lr=factor * optimizer.lr)), parameters)

    setup.build_optimizer = build_faster


def decay_groups_without(training: Training) -> Training:
    """Give groups that have no weight decay the optimizer's."""
    decay = training.optimizer.weight_decay
    return replace(training, groups=tuple(replace(group, weight_decay=group.weight_decay or decay) for group in training.groups))


def couple_decay(training: Training) -> Training:
    """Decouple weight decay that is coupled to gradients, and couple it where it is decoupled."""
    optimizer = training.optimizer
    if not _has_decay(training):
        return training
    if isinstance(optimizer, (NAdam, RAdam)):
        return replace(training, optimizer=replace(optimizer, decoupled_weight_decay=not optimizer.decoupled_weight_decay))
    if isinstance(optimizer, Adam):
        other = Adam if isinstance(optimizer, AdamW) else AdamW
        return replace(training, optimizer=other(**{field.name: getattr(optimizer, field.name) for field in fields(optimizer)}))
    return training


def decay_twice(training: Training) -> Training:
    """Double every weight decay."""
    groups = tuple(replace(group, weight_decay=2.0 * group.weight_decay) for group in training.groups)
    optimizer = replace(training.optimizer, weight_decay=2.0 * training.optimizer.weight_decay)
    return replace(training, groups=groups, optimizer=optimizer)


def forget_groups(training: Training) -> Training:
    """Leave every parameter to the optimizer's own settings."""
    return replace(training, groups=())


def forget_group_rates(training: Training) -> Training:
    """Give every group the optimizer's learning rate."""
    return replace(training, groups=tuple(replace(group, lr_factor=1.0) for group in training.groups))


def lower_beta2(training: Training) -> Training:
    """Let the average of squares forget ten times faster: 0.99 for 0.999."""
    betas = getattr(training.optimizer, "betas", None)
    if betas is None:
        return training
    return _with(training, betas=(betas[0], round(max(0.0, 1.0 - 10.0 * (1.0 - betas[1])), 12)))


def swap_betas(training: Training) -> Training:
    """Take each beta for the other."""
    betas = getattr(training.optimizer, "betas", None)
    return training if betas is None else _with(training, betas=betas[::-1])


def enlarge_eps(training: Training) -> Training:
    """Add a hundred times as much to denominators: 1e-6 for 1e-8."""
    eps = getattr(training.optimizer, "eps", None)
    return _with(training, eps=100.0 * eps) if isinstance(eps, float) else training


def forget_amsgrad(training: Training) -> Training:
    """Use the second moment as it is, not the largest so far."""
    return _with(training, amsgrad=False) if isinstance(training.optimizer, Adam) else training


def forget_momentum(training: Training) -> Training:
    """Update by the gradient alone."""
    optimizer = training.optimizer
    if isinstance(optimizer, SGD):
        return _with(training, momentum=0.0, dampening=0.0, nesterov=False)
    return _with(training, momentum=0.0) if isinstance(optimizer, RMSprop) else training


def forget_nesterov(training: Training) -> Training:
    """Take plain momentum; Muon is left out, as its first step is the same but for rounding to bfloat16."""
    return _with(training, nesterov=False) if isinstance(training.optimizer, SGD) else training


def forget_dampening(training: Training) -> Training:
    """Add gradients to the momentum undamped."""
    return _with(training, dampening=0.0) if isinstance(training.optimizer, SGD) else training


def forget_maximize(training: Training) -> Training:
    """Descend."""
    return _with(training, maximize=False)


def _with(training: Training, **changes: object) -> Training:
    return replace(training, optimizer=replace(training.optimizer, **changes))  # type: ignore[arg-type]


def _has_decay(training: Training) -> bool:
    return training.optimizer.weight_decay > 0.0 or any(group.weight_decay > 0.0 for group in training.groups)


def _decays(scenario: Scenario) -> bool:
    return not isinstance(scenario.training.optimizer, Rprop) and _has_decay(scenario.training)


def _has_digits_of_float64(scenario: Scenario) -> bool:
    """Whether nothing is rounded to fewer digits: in float32, 1e-6 beside a gradient of 1 is rounding."""
    return scenario.training.precision is Precision.FLOAT64 and rounding_of(scenario.layout) is None


def _optimizer(  # noqa: PLR0913 - the fields of a mutant, by keyword
    *,
    name: str,
    wrong: str,
    change: Change,
    causes: tuple[Cause, ...],
    because: str,
    steps: int = 1,
    layers: int = 1,
    applies: Callable[[Scenario], bool] = lambda _scenario: True,
) -> Mutant:
    """A mutant whose optimizer is that of another training: planted where the two trainings differ."""

    def differs(scenario: Scenario) -> bool:
        return change(scenario.training) != scenario.training

    return Mutant(
        name=name,
        wrong=wrong,
        family=Family.OPTIMIZER,
        layouts=EVERYWHERE,
        applies=both(is_eager, updates_tell, differs, applies),
        plant=OptimizerOfAnother(change=change),
        causes=causes,
        minimum=Minimum(ranks=1, layers=layers, steps=steps, because=because),
    )


_ONE_UPDATE = "a rank updates alone, and the first update shows it"

HYPERPARAMETERS: tuple[Mutant, ...] = (
    _optimizer(
        name="decay_on_groups_without",
        wrong="Weight decay is applied to parameter groups that should have none.",
        change=decay_groups_without,
        causes=(Cause.DECAY_EVERYWHERE, Cause.HYPERPARAMETER),
        because=_ONE_UPDATE,
    ),
    _optimizer(
        name="decay_coupled",
        wrong="Weight decay is coupled to gradients where it should be decoupled, or the other way round.",
        change=couple_decay,
        causes=(Cause.DECAY_COUPLED,),
        because=_ONE_UPDATE,
    ),
    _optimizer(
        name="decay_twice",
        wrong="Weight decay is applied twice.",
        change=decay_twice,
        causes=(Cause.DECAY_TWICE, Cause.HYPERPARAMETER),
        because=_ONE_UPDATE,
        applies=_decays,
    ),
    _optimizer(
        name="groups_forgotten",
        wrong="Parameters have lost their groups, and are updated with the optimizer's own settings.",
        change=forget_groups,
        causes=(Cause.HYPERPARAMETER, Cause.DECAY_EVERYWHERE),
        because=_ONE_UPDATE,
    ),
    _optimizer(
        name="group_rates_forgotten",
        wrong="Groups are updated at the optimizer's own learning rate.",
        change=forget_group_rates,
        causes=(Cause.HYPERPARAMETER,),
        because=_ONE_UPDATE,
    ),
    _optimizer(
        name="beta2_lowered",
        wrong="The average of squared gradients decays ten times faster: beta2 is 0.99 for 0.999.",
        change=lower_beta2,
        causes=(Cause.HYPERPARAMETER,),
        because="optimizer state shows it after one update; parameters, for the correction of its bias, after two",
    ),
    _optimizer(
        name="betas_swapped",
        wrong="The two betas are each taken for the other.",
        change=swap_betas,
        causes=(Cause.HYPERPARAMETER,),
        because="optimizer state shows it after one update",
    ),
    _optimizer(
        name="eps_enlarged",
        wrong="A hundred times as much is added to denominators: eps is 1e-6 for 1e-8.",
        change=enlarge_eps,
        causes=(Cause.HYPERPARAMETER,),
        because=_ONE_UPDATE,
        applies=_has_digits_of_float64,
    ),
    _optimizer(
        name="amsgrad_forgotten",
        wrong="The flag amsgrad is lost: second moments may shrink.",
        change=forget_amsgrad,
        causes=(Cause.HYPERPARAMETER,),
        because="optimizer state shows it after one update: the largest second moment is missing",
    ),
    _optimizer(
        name="momentum_forgotten",
        wrong="Momentum is lost: parameters are updated by the gradient alone.",
        change=forget_momentum,
        causes=(Cause.HYPERPARAMETER,),
        because="optimizer state shows it after one update: there is none; parameters may after two only",
    ),
    _optimizer(
        name="nesterov_forgotten",
        wrong="The flag nesterov is lost: momentum does not look ahead.",
        change=forget_nesterov,
        causes=(Cause.HYPERPARAMETER,),
        because=_ONE_UPDATE,
    ),
    _optimizer(
        name="dampening_forgotten",
        wrong="Gradients enter the momentum undamped.",
        change=forget_dampening,
        causes=(Cause.HYPERPARAMETER,),
        because="momentum starts as the first gradient, damped or not: the second step shows it",
        steps=2,
    ),
    _optimizer(
        name="maximize_forgotten",
        wrong="The flag maximize is lost: parameters descend.",
        change=forget_maximize,
        causes=(Cause.HYPERPARAMETER,),
        because=_ONE_UPDATE,
    ),
    Mutant(
        name="rate_scaled_by_ranks",
        wrong="The learning rate is multiplied by the number of ranks, although gradients are averaged.",
        family=Family.OPTIMIZER,
        layouts=EVERYWHERE,
        applies=both(is_eager, updates_tell),
        plant=scale_rate_by_ranks,
        causes=(Cause.HYPERPARAMETER,),
        minimum=Minimum(because="times one rank is no change"),
    ),
)
"""Every such mutant."""
