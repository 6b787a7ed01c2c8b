"""Trainings and layouts without one feature each: what limits repair with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from equivcheck.errors import InvalidScenario
from equivcheck.scenario import (
    AnyLayer,
    AuxiliaryLinear,
    CrossEntropy,
    GatedMLP,
    Head,
    Implementation,
    Layer,
    Layout,
    Loss,
    Model,
    Optimizer,
    Parallelism,
    Tokens,
    Training,
)
from equivcheck.scenario.data import USUAL_ROWS
from equivcheck.scenario.model import MAX_WIDTH
from equivcheck.scenario.token_layers import MAX_LENGTH

STEEP = 1024
"""How much smaller the learning rate is where a square error is summed (over, say, 64 rows of 16 outputs) or ascended."""


LEAST_TOKENS = 3
"""Tokens of a model that had none."""


def with_model(training: Training, **changes: object) -> Training:
    """The training with other fields of its model; of real targets where that leaves one output, as labels need two."""
    model = replace(training.model, **changes)  # type: ignore[arg-type]
    return replace(training if model.outputs > 1 else of_real_targets(training), model=model)


def each_layer(training: Training, change: Callable[[int, AnyLayer], AnyLayer]) -> Training:
    """The training with every layer replaced by ``change(index, layer)``."""
    return with_model(training, layers=tuple(change(index, layer) for index, layer in enumerate(training.model.layers)))


def with_layer(training: Training, index: int, layer: AnyLayer) -> Training:
    """The training with another layer in a place; where widths no longer meet, nothing is residual, shared or tied."""
    changed = tuple(layer if at == index else other for at, other in enumerate(training.model.layers))
    with suppress(InvalidScenario):
        return with_model(training, layers=changed)
    head = training.model.head and replace(training.model.head, tied=False)
    return with_model(training, layers=tuple(each.having(residual=False, shares=None) for each in changed), head=head)


def shared_out(training: Training, index: int) -> Training:
    """The training with another kind of layer in a place, which can be shared out as the one there cannot be.

    A linear layer can be by inputs and outputs, a gated perceptron by what it has within.
    """
    model, bias = training.model, training.optimizer.takes_vectors
    if isinstance(model.layers[index], Layer):
        return with_layer(training, index, GatedMLP(hidden=1, frozen=model.layers[index].frozen))
    return with_layer(training, index, Layer(width=model.inputs(index + 1), bias=bias, frozen=model.layers[index].frozen))


def without_shares(training: Training) -> Training:
    """Every layer has a weight of its own."""
    return each_layer(training, lambda _index, layer: layer.having(shares=None))


def untied(training: Training) -> Training:
    """The head has a weight of its own."""
    head = training.model.head
    return with_model(training, head=head and replace(head, tied=False))


def without_ties(training: Training) -> Training:
    """No weight has two uses."""
    return untied(without_shares(training))


def with_head(training: Training) -> Training:
    """A model of tokens that ends in a head."""
    model = training.model
    plain = each_layer(training, lambda _index, layer: layer.having(shape_op=None))
    source, length = model.source or Tokens(vocabulary=LEAST_TOKENS), model.length or 1
    return with_model(plain, source=source, length=length, head=model.head or Head())


def without_auxiliary(training: Training) -> Training:
    """No layer has a second linear."""
    return each_layer(training, lambda _index, layer: layer.having(auxiliary=None))


def without_frozen(training: Training) -> Training:
    """Every parameter is trained."""
    source = training.model.source
    trained = with_model(training, source=source and replace(source, frozen=False))
    return each_layer(trained, lambda _index, layer: layer.having(frozen=False))


def without_routing(training: Training) -> Training:
    """Layers that choose nothing in the place of those that do."""
    return each_layer(training, lambda _index, layer: layer.without_routing())


def of_labels(training: Training) -> Training:
    """A model of tokens that ends in a head, with a loss of labels."""
    return training if isinstance(training.loss, CrossEntropy) else replace(with_head(training), loss=CrossEntropy())


def with_loss(training: Training, **changes: object) -> Training:
    """The training with other fields of a loss of labels."""
    loss = training.loss
    return replace(training, loss=replace(loss, **changes)) if isinstance(loss, CrossEntropy) else training  # type: ignore[arg-type]


def without_scale(training: Training) -> Training:
    """Every parameter has a dim."""
    return with_model(training, scale=False)


def with_rows(training: Training, multiple: int) -> Training:
    """Rows of every microbatch rounded to a multiple: up, or down where that is more than a microbatch may have."""
    microbatches = tuple(rounded(rows, multiple, max(USUAL_ROWS, multiple)) for rows in training.data.microbatches)
    return replace(training, data=replace(training.data, microbatches=microbatches))


def with_equal_rows(training: Training) -> Training:
    """Every microbatch has as many rows as the largest."""
    rows = training.data.microbatches
    return replace(training, data=replace(training.data, microbatches=(max(rows),) * len(rows)))


def with_positions(training: Training, multiple: int) -> Training:
    """Positions of sequences rounded to a multiple."""
    length = training.model.length
    return with_model(training, length=None if length is None else rounded(length, multiple, max(MAX_LENGTH, multiple)))


def with_widths(training: Training, multiple: int) -> Training:
    """Features, all widths, tokens and learnt positions rounded up to a multiple, so that equal ones stay equal.

    A size for which that is too much is the multiple.

    Rounded down, widths near the largest would swing between two layouts that ask for different multiples (30 and 32 for 3 and
    4); from the least on they come up to what suits both.
    """
    model = training.model
    features, *widths = (_fitted(width, multiple, MAX_WIDTH) for width in model.widths)
    layers = tuple(layer.having(width=width).rounded(multiple) for layer, width in zip(model.layers, widths, strict=True))
    return with_model(with_tables(training, multiple), features=features, layers=layers)


def with_tables(training: Training, multiple: int) -> Training:
    """Tokens and learnt positions rounded up to a multiple; where that is too much, the multiple."""
    source, length = training.model.source, training.model.length
    if source is None or length is None:
        return training
    if source.learned_positions:
        length = _fitted(length, multiple, MAX_LENGTH)
    return with_model(training, source=source.rounded(multiple), length=length)


def _fitted(size: int, multiple: int, largest: int) -> int:
    """A size rounded up to a multiple; where that is too much, the multiple, or else 1."""
    up = -(-size // multiple) * multiple
    return up if up <= largest else multiple if multiple <= largest else 1


def over_features(training: Training) -> Training:
    """The training of linear layers alone, as wide as its layers, over rows of real numbers."""
    model, bias = training.model, training.optimizer.takes_vectors
    layers = tuple(
        layer if isinstance(layer, Layer) else Layer(width=width, bias=bias)
        for layer, width in zip(model.layers, model.widths[1:], strict=True)
    )
    if all(layer.frozen or layer.shares is not None for layer in layers):
        layers = (replace(layers[0], frozen=False, shares=None), *layers[1:])
    plain = replace(model, length=None, source=None, head=None, layers=layers)
    takes_labels = plain.outputs > 1 and not training.data.batch_dim
    return replace(training, model=plain, loss=training.loss if takes_labels else of_real_targets(training).loss)


def of_real_targets(training: Training) -> Training:
    """The training with a loss of real targets."""
    return replace(training, loss=Loss.MSE_MEAN) if isinstance(training.loss, CrossEntropy) else training


def with_loop(training: Training, _layout: Layout) -> Training:
    """The optimizer goes through its parameters one by one."""
    return replace(training, optimizer=replace(training.optimizer, implementation=Implementation.FOR_LOOP))


def tamed(optimizer: Optimizer, loss: Loss | CrossEntropy) -> Optimizer:
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
    # Over sequences a bias would leave what a stage of a pipeline hands on a view.
    bias = training.optimizer.takes_vectors and training.model.length is None
    layers += (Layer(width=training.model.inputs(len(layers)), bias=bias),) * (count - len(layers))
    if all(layer.frozen or layer.shares is not None for layer in layers):
        layers = (layers[0].having(frozen=False), *layers[1:])
    return with_model(training, layers=layers)


def rounded(value: int, multiple: int, largest: int) -> int:
    """The value rounded up to a multiple, or down to the last one that is not above `largest`; 1 where there is none."""
    up = -(-value // multiple) * multiple
    return up if up <= largest else max(largest // multiple * multiple, 1)


def has_frozen(model: Model) -> bool:
    """Whether anything requires no gradient."""
    return any(layer.frozen for layer in model.layers) or (model.source is not None and model.source.frozen)


def has_routing(model: Model) -> bool:
    """Whether a layer chooses experts."""
    return any(layer.without_routing() != layer for layer in model.layers)


def has_shares(model: Model) -> bool:
    """Whether any two layers share a weight."""
    return any(layer.shares is not None for layer in model.layers)


def is_tied(model: Model) -> bool:
    """Whether the head has the weight of the embedding."""
    return model.head is not None and model.head.tied


def has_ties(model: Model) -> bool:
    """Whether any weight has two uses, in two layers or in the embedding and the head."""
    return has_shares(model) or is_tied(model)


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
