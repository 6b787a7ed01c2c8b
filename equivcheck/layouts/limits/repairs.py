"""Trainings and layouts without one feature each: what limits repair with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from equivcheck.scenario import AuxiliaryLinear, Implementation, Layer, Layout, Loss, Model, Optimizer, Parallelism, Training
from equivcheck.scenario.data import USUAL_ROWS
from equivcheck.scenario.model import MAX_WIDTH

STEEP = 1024
"""How much smaller the learning rate is where a square error is summed (over, say, 64 rows of 16 outputs) or ascended."""


def with_model(training: Training, **changes: object) -> Training:
    """The training with other fields of its model."""
    return replace(training, model=replace(training.model, **changes))  # type: ignore[arg-type]


def each_layer(training: Training, change: Callable[[int, Layer], Layer]) -> Training:
    """The training with every layer replaced by ``change(index, layer)``."""
    return with_model(training, layers=tuple(change(index, layer) for index, layer in enumerate(training.model.layers)))


def without_shares(training: Training) -> Training:
    """Every layer has a weight of its own."""
    return each_layer(training, lambda _index, layer: replace(layer, shares=None))


def without_auxiliary(training: Training) -> Training:
    """No layer has a second linear."""
    return each_layer(training, lambda _index, layer: replace(layer, auxiliary=None))


def without_frozen(training: Training) -> Training:
    """Every parameter is trained."""
    return each_layer(training, lambda _index, layer: replace(layer, frozen=False))


def without_scale(training: Training) -> Training:
    """Every parameter has a dim."""
    return with_model(training, scale=False)


def with_rows(training: Training, multiple: int) -> Training:
    """Rows of every microbatch rounded to a multiple: up, or down where that is more than a microbatch may have."""
    microbatches = tuple(rounded(rows, multiple, max(USUAL_ROWS, multiple)) for rows in training.data.microbatches)
    return replace(training, data=replace(training.data, microbatches=microbatches))


def with_widths(training: Training, multiple: int) -> Training:
    """Features and all widths rounded up to a multiple, so that equal ones stay equal; where that is too much, the multiple.

    Rounded down, widths near the largest would swing between two layouts that ask for different multiples (30 and 32 for 3 and
    4); from the least on they come up to what suits both.
    """

    def fitted(width: int) -> int:
        up = -(-width // multiple) * multiple
        return up if up <= MAX_WIDTH else multiple if multiple <= MAX_WIDTH else 1

    layers = tuple(replace(layer, width=fitted(layer.width)) for layer in training.model.layers)
    return with_model(training, features=fitted(training.model.features), layers=layers)


def with_loop(training: Training, _layout: Layout) -> Training:
    """The optimizer goes through its parameters one by one."""
    return replace(training, optimizer=replace(training.optimizer, implementation=Implementation.FOR_LOOP))


def tamed(optimizer: Optimizer, loss: Loss) -> Optimizer:
    """The optimizer at a rate at which a few steps of a deep model do not overflow, as they would then prove nothing."""
    if loss is Loss.MSE_SUM or (loss is Loss.MSE_MEAN and optimizer.maximize):
        return replace(optimizer, lr=optimizer.lr / STEEP)
    return optimizer


def with_summed_squares(training: Training) -> Training:
    """Squared errors are summed where they were averaged, at a rate for that."""
    if training.loss is not Loss.MSE_MEAN:
        return training
    # One that ascends is slowed down under either loss.
    optimizer = training.optimizer if training.optimizer.maximize else tamed(training.optimizer, Loss.MSE_SUM)
    return replace(training, loss=Loss.MSE_SUM, optimizer=optimizer)


def with_num_layers(training: Training, count: int) -> Training:
    """The first layers, or all of them and plain ones of the same width after them."""
    layers = training.model.layers[:count]
    layers += (Layer(width=layers[-1].width, bias=training.optimizer.takes_vectors),) * (count - len(layers))
    if all(layer.frozen or layer.shares is not None for layer in layers):
        layers = (replace(layers[0], frozen=False), *layers[1:])
    return with_model(training, layers=layers)


def rounded(value: int, multiple: int, largest: int) -> int:
    """The value rounded up to a multiple, or down to the last one that is not above `largest`; 1 where there is none."""
    up = -(-value // multiple) * multiple
    return up if up <= largest else max(largest // multiple * multiple, 1)


def has_shares(model: Model) -> bool:
    """Whether any two layers share a weight."""
    return any(layer.shares is not None for layer in model.layers)


def trained_auxiliaries(model: Model) -> set[AuxiliaryLinear]:
    """When the second linears run that are trained."""
    return {layer.auxiliary for layer in model.layers if layer.auxiliary is not None and not layer.frozen}


def may_skip_parameters(training: Training) -> bool:
    """Whether at some step a trained parameter takes no part."""
    auxiliaries = trained_auxiliaries(training.model)
    return AuxiliaryLinear.NEVER in auxiliaries or (AuxiliaryLinear.EVEN_STEPS in auxiliaries and training.steps > 1)


def all_multiples(values: Iterable[int], multiple: int) -> bool:
    """Whether every value is a multiple of one number."""
    return all(value % multiple == 0 for value in values)


def with_options(layout: Layout, kind: type[Parallelism] | tuple[type[Parallelism], ...], **changes: object) -> Layout:
    """The layout with other options of its parallelism of that kind, or of one of those kinds."""
    parallelisms = tuple(
        replace(parallelism, **changes) if isinstance(parallelism, kind) else parallelism for parallelism in layout.parallelisms
    )
    return replace(layout, parallelisms=parallelisms)


def with_execution(layout: Layout, **changes: object) -> Layout:
    """The layout run in another way."""
    return replace(layout, execution=replace(layout.execution, **changes))  # type: ignore[arg-type]
