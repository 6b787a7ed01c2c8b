"""Repairs for limits: each function returns a training or layout without one feature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from equivcheck.errors import InvalidScenario
from equivcheck.scenario import (
    FSDP2,
    AnyLayer,
    AuxiliaryLinear,
    CrossEntropy,
    ExpertParallel,
    ExpertStorage,
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
from equivcheck.scenario.layers.linear import MAX_WIDTH
from equivcheck.scenario.layers.token_layers import MAX_LENGTH
from equivcheck.training.layers.registry import layer_kind

STEEP = 1024
"""Divisor for the learning rate if squared errors are summed (for example over 64 rows with 16 outputs) or maximised."""


LEAST_TOKENS = 3
"""Smallest vocabulary for a model that gets tokens."""


def with_model(training: Training, **changes: object) -> Training:
    """Replace fields in the model.

    If the new model has one output, also replace a loss on labels by the mean squared error, because labels need two classes.
    """
    model = replace(training.model, **changes)  # type: ignore[arg-type]
    return replace(training if model.out_features > 1 else with_real_targets(training), model=model)


def each_layer(training: Training, change: Callable[[int, AnyLayer], AnyLayer]) -> Training:
    """Replace every layer of the training's model by ``change(index, layer)``."""
    return with_model(training, layers=tuple(change(index, layer) for index, layer in enumerate(training.model.layers)))


def with_layer(training: Training, index: int, layer: AnyLayer) -> Training:
    """Replace one layer. If layer sizes no longer match, also remove residuals, shared weights and the tied head."""
    changed = tuple(layer if at == index else other for at, other in enumerate(training.model.layers))
    with suppress(InvalidScenario):
        return with_model(training, layers=changed)
    head = training.model.head and replace(training.model.head, tied=False)
    return with_model(training, layers=tuple(each.with_fields(residual=False, shares=None) for each in changed), head=head)


def with_shardable_layer(training: Training, index: int) -> Training:
    """Replace one layer by a kind that tensor parallelism can split: a linear layer by a gated MLP, others by a linear layer."""
    model, bias = training.model, training.optimizer.updates_vectors
    if isinstance(model.layers[index], Layer):
        return with_layer(training, index, GatedMLP(hidden=1, frozen=model.layers[index].frozen))
    return with_layer(training, index, Layer(width=model.in_features(index + 1), bias=bias, frozen=model.layers[index].frozen))


def without_shares(training: Training) -> Training:
    """Give every layer its own weight, so that no layers share one."""
    return each_layer(training, lambda _index, layer: layer.with_fields(shares=None))


def without_tied_head(training: Training) -> Training:
    """Give the head its own weight."""
    head = training.model.head
    return with_model(training, head=head and replace(head, tied=False))


def without_ties(training: Training) -> Training:
    """Give every layer and the head their own weights, unshared."""
    return without_tied_head(without_shares(training))


def with_head(training: Training) -> Training:
    """Turn the model into a token model that ends in a head."""
    model = training.model
    plain = each_layer(training, lambda _index, layer: layer.with_fields(shape_op=None))
    source, length = model.source or Tokens(vocabulary=LEAST_TOKENS), model.length or 1
    return with_model(plain, source=source, length=length, head=model.head or Head())


def without_auxiliary(training: Training) -> Training:
    """Remove the auxiliary linear from all layers."""
    return each_layer(training, lambda _index, layer: layer.with_fields(auxiliary=None))


def without_frozen(training: Training) -> Training:
    """Train every parameter."""
    source = training.model.source
    trained = with_model(training, source=source and replace(source, frozen=False))
    return each_layer(with_trained_bases(trained), lambda _index, layer: layer.with_fields(frozen=False))


def with_trained_bases(training: Training) -> Training:
    """Train the base weights of all adapters."""
    return each_layer(training, lambda _index, layer: layer.with_fields(frozen_base=False))


def without_routing(training: Training) -> Training:
    """Replace layers that choose experts by layers without a router."""
    return each_layer(training, lambda _index, layer: layer.without_routing())


def with_equal_experts(training: Training, ranks: int) -> Training:
    """Round the numbers of experts up, so that each rank gets equally many."""

    def round_up(_index: int, layer: AnyLayer) -> AnyLayer:
        return layer if layer_kind(layer).dispatch(layer) is None else layer.rounded_up(ranks)

    return each_layer(training, round_up)


def without_router_bias(training: Training) -> Training:
    """Let routers choose experts by their scores only."""
    return each_layer(training, lambda _index, layer: layer.with_fields(router_bias_rate=0.0))


def with_labels(training: Training) -> Training:
    """Use a cross-entropy loss, with a token model that ends in a head."""
    return training if isinstance(training.loss, CrossEntropy) else replace(with_head(training), loss=CrossEntropy())


def with_loss(training: Training, **changes: object) -> Training:
    """Replace fields in a cross-entropy loss. Other losses stay unchanged."""
    loss = training.loss
    return replace(training, loss=replace(loss, **changes)) if isinstance(loss, CrossEntropy) else training  # type: ignore[arg-type]


def without_scale(training: Training) -> Training:
    """Remove the model's scalar scale."""
    return with_model(training, scale=False)


def with_rows(training: Training, multiple: int) -> Training:
    """Round the number of rows in every microbatch up to a multiple of `multiple`; round down if there would be too many rows."""
    microbatches = tuple(round_to_multiple(rows, multiple, max(USUAL_ROWS, multiple)) for rows in training.data.microbatches)
    return replace(training, data=replace(training.data, microbatches=microbatches))


def with_equal_rows(training: Training) -> Training:
    """Give every microbatch as many rows as the largest microbatch."""
    rows = training.data.microbatches
    return replace(training, data=replace(training.data, microbatches=(max(rows),) * len(rows)))


def with_positions(training: Training, multiple: int) -> Training:
    """Round the sequence length up to a multiple of `multiple`; round down if the length would be too large."""
    length = training.model.length
    return with_model(training, length=None if length is None else round_to_multiple(length, multiple, max(MAX_LENGTH, multiple)))


def with_widths(training: Training, multiple: int) -> Training:
    """Round features, widths, vocabulary and learned positions up to a multiple. Equal sizes stay equal.

    A size that would become too large is set to `multiple` itself, because rounding down may never end. For two layouts with the
    multiples 3 and 4, repairs would alternate between 30 and 32. Small sizes grow until both layouts accept them.
    """
    model = training.model
    features, *widths = (_fitted(width, multiple, MAX_WIDTH) for width in model.widths)
    layers = tuple(layer.with_fields(width=width).rounded_up(multiple) for layer, width in zip(model.layers, widths, strict=True))
    return with_model(with_tables(training, multiple), features=features, layers=layers)


def with_tables(training: Training, multiple: int) -> Training:
    """Round the vocabulary and the learned positions up to multiples.

    A size that would become too large is set to `multiple` itself.
    """
    source, length = training.model.source, training.model.length
    if source is None or length is None:
        return training
    if source.learned_positions:
        length = _fitted(length, multiple, MAX_LENGTH)
    return with_model(training, source=source.rounded_up(multiple), length=length)


def _fitted(size: int, multiple: int, largest: int) -> int:
    """Round a size up to a multiple. If that exceeds `largest`, return the multiple itself, or else 1."""
    up = -(-size // multiple) * multiple
    return up if up <= largest else multiple if multiple <= largest else 1


def with_tokens(training: Training, multiple: int) -> Training:
    """Round the vocabulary up to a multiple. If it would become too large, it is set to `multiple` itself."""
    source = training.model.source
    return with_model(training, source=source and source.rounded_up(multiple))


def with_linear_layers(training: Training) -> Training:
    """Replace the model by linear layers with the same widths, on rows of real numbers, without embedding and head."""
    model, bias = training.model, training.optimizer.updates_vectors
    layers = tuple(
        layer if isinstance(layer, Layer) else Layer(width=width, bias=bias)
        for layer, width in zip(model.layers, model.widths[1:], strict=True)
    )
    if all(layer.frozen or layer.shares is not None for layer in layers):
        layers = (replace(layers[0], frozen=False, shares=None), *layers[1:])
    plain = replace(model, length=None, document_length=None, source=None, head=None, layers=layers)
    takes_labels = plain.out_features > 1 and not training.data.batch_dim
    return replace(training, model=plain, loss=training.loss if takes_labels else with_real_targets(training).loss)


def with_real_targets(training: Training) -> Training:
    """Replace a loss on labels by the mean squared error."""
    return replace(training, loss=Loss.MSE_MEAN) if isinstance(training.loss, CrossEntropy) else training


def with_loop(training: Training, _layout: Layout) -> Training:
    """Let the optimizer update parameters in a loop, one after the other (``foreach=False``)."""
    return replace(training, optimizer=replace(training.optimizer, implementation=Implementation.FOR_LOOP))


def with_stable_lr(optimizer: Optimizer, loss: Loss | CrossEntropy) -> Optimizer:
    """Return the optimizer with a lower learning rate if a few steps would overflow. Overflowed values prove nothing."""
    if loss is Loss.MSE_SUM or (loss is Loss.MSE_MEAN and optimizer.maximize):
        return replace(optimizer, lr=optimizer.lr / STEEP)
    return optimizer


def with_summed_squares(training: Training, *, also_linear: bool = False) -> Training:
    """Replace a mean of squared errors by their sum, and lower the learning rate to match.

    With `also_linear`, replace linear losses by this sum, too.
    """
    if training.loss is not Loss.MSE_MEAN and not (also_linear and training.loss.is_linear):
        return training
    # A maximising optimizer already has the lower rate.
    optimizer = training.optimizer if training.optimizer.maximize else with_stable_lr(training.optimizer, Loss.MSE_SUM)
    return replace(training, loss=Loss.MSE_SUM, optimizer=optimizer)


def with_num_layers(training: Training, count: int) -> Training:
    """Keep the first `count` layers, or append linear layers as wide as the last layer."""
    layers = training.model.layers[:count]
    # Over sequences, a linear with bias would make the output of a pipeline stage a view.
    bias = training.optimizer.updates_vectors and training.model.length is None
    layers += (Layer(width=training.model.in_features(len(layers)), bias=bias),) * (count - len(layers))
    if all(layer.frozen or layer.shares is not None for layer in layers):
        layers = (layers[0].with_fields(frozen=False), *layers[1:])
    return with_model(training, layers=layers)


def round_to_multiple(value: int, multiple: int, largest: int) -> int:
    """Round `value` up to a multiple, or down if the result exceeds `largest`. The result is at least 1."""
    up = -(-value // multiple) * multiple
    return up if up <= largest else max(largest // multiple * multiple, 1)


def has_frozen(model: Model) -> bool:
    """Whether any layer, a layer's base weight or the embedding is frozen."""
    return any(layer.frozen or layer.frozen_base for layer in model.layers) or (model.source is not None and model.source.frozen)


def has_routing(model: Model) -> bool:
    """Whether any layer has a router that chooses experts."""
    return any(layer.without_routing() != layer for layer in model.layers)


def has_shares(model: Model) -> bool:
    """Whether any layer shares another layer's weight."""
    return any(layer.shares is not None for layer in model.layers)


def is_tied(model: Model) -> bool:
    """Whether the head uses the embedding's weight."""
    return model.head is not None and model.head.tied


def has_ties(model: Model) -> bool:
    """Whether any weight is used twice: in two layers, or in embedding and head."""
    return has_shares(model) or is_tied(model)


def trained_auxiliaries(model: Model) -> set[AuxiliaryLinear]:
    """Return the steps at which layers run their auxiliary linears, for auxiliary linears that are trained."""
    return {layer.auxiliary for layer in model.layers if layer.auxiliary is not None and not layer.frozen}


def may_skip_parameters(training: Training) -> bool:
    """Whether some trained parameter is not used in some step."""
    auxiliaries = trained_auxiliaries(training.model)
    return AuxiliaryLinear.NEVER in auxiliaries or (AuxiliaryLinear.EVEN_STEPS in auxiliaries and training.steps > 1)


def all_multiples(values: Iterable[int], multiple: int) -> bool:
    """Whether every value is a multiple of `multiple`."""
    return all(value % multiple == 0 for value in values)


def with_options(layout: Layout, kind: type[Parallelism] | tuple[type[Parallelism], ...], **changes: object) -> Layout:
    """Replace options in all parallelisms of the given types."""
    parallelisms = tuple(
        replace(parallelism, **changes) if isinstance(parallelism, kind) else parallelism for parallelism in layout.parallelisms
    )
    return replace(layout, parallelisms=parallelisms)


def with_plain_experts(layout: Layout) -> Layout:
    """Store experts as plain tensors, and change options that need DTensors."""
    return with_options(with_options(layout, FSDP2, shard_over_ep=False), ExpertParallel, storage=ExpertStorage.PLAIN)


def only_one(layout: Layout, kind: type[Parallelism], axis: str) -> Layout:
    """Keep only the parallelism of type `kind`, on the mesh axis `axis`."""
    mesh = replace(layout.mesh, axes=tuple(each for each in layout.mesh.axes if each.name == axis))
    return replace(layout, mesh=mesh, parallelisms=layout.of(kind))


def with_execution(layout: Layout, **changes: object) -> Layout:
    """Replace fields in the layout's execution."""
    return replace(layout, execution=replace(layout.execution, **changes))  # type: ignore[arg-type]
