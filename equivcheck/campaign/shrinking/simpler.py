"""Changes that make a scenario simpler. Hypothesis may miss them, because it shrinks choices, not scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import singledispatch
from typing import Any, TypeVar

from equivcheck.campaign.findings.size import is_default, size_of
from equivcheck.campaign.shrinking.programs import PROGRAM_CHANGES
from equivcheck.errors import EquivCheckError
from equivcheck.layouts.base.limits.repairs import with_linear_layers, with_real_targets
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.programs.nouns import TensorProgram
from equivcheck.scenario import (
    ActivationSharding,
    AnyLayer,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Pipeline,
    PlannedParallelism,
    Scenario,
    Split,
    Training,
)
from equivcheck.scenario.case import Checkable

T = TypeVar("T")

C = TypeVar("C", bound=Checkable)

Change = Callable[[C], Iterator[C]]
"""Function that yields a case with one change, in several variants. Some variants cannot run, or are not smaller."""

_WIDTHS = (1, 2, 3, 4)
"""Values to try for features and widths."""
_VOCABULARIES = (2, 3)
_LESS_WITHIN: tuple[dict[str, Any], ...] = (
    *({"hidden": hidden} for hidden in _WIDTHS),
    *({"num_heads": heads, "num_kv_heads": num_kv_heads} for heads, num_kv_heads in ((1, 1), (2, 1), (2, 2), (4, 2))),
    *({"head_dim": width} for width in _WIDTHS),
    *({"num_experts": count} for count in _WIDTHS),
    {"top_k": 1, "normalised": False},
    {"balance": 0.0, "balance_per_sequence": False},
    {"rank": 1},
)
"""Values to try inside layers other than linear layers."""


def simpler_by(kind: Change[C], case: C, *, beyond: bool = False) -> Iterator[C]:
    """Yield the smaller cases made from `case` by one kind of change.

    A changed case that cannot run is repaired, or left out if the repair fails. Equal cases are yielded once. With `beyond`,
    torch's own limits are ignored.
    """
    size, seen = size_of(case), set[C]()
    for changed in kind(case):
        found = fit_scenario(changed, beyond=beyond)
        if found is not None and size_of(found) < size and found not in seen:
            seen.add(found)
            yield found


def _without_resume(scenario: Scenario) -> Iterator[Scenario]:
    yield replace(scenario, resume=None)


def _eagerly(scenario: Scenario) -> Iterator[Scenario]:
    """Drop compilation and similar options, because they slow down all later checks."""
    yield replace(scenario, layout=replace(scenario.layout, execution=Execution()))


def _on_fewer_ranks(scenario: Scenario) -> Iterator[Scenario]:
    """Use fewer ranks on one axis. Pipeline stages become as even as possible."""
    layout = scenario.layout
    parallelisms = tuple(replace(each, boundaries=()) if isinstance(each, Pipeline) else each for each in layout.parallelisms)
    for number, axis in enumerate(layout.mesh.axes):
        for size in range(1, axis.size):
            axes = list(layout.mesh.axes)
            axes[number] = replace(axis, size=size)
            with suppress(EquivCheckError):
                yield replace(scenario, layout=replace(layout, mesh=Mesh(axes=tuple(axes)), parallelisms=parallelisms))


def _of_fewer_layers(scenario: Scenario) -> Iterator[Scenario]:
    """Remove one layer, also from the tensor-parallel plan."""
    model, layout = scenario.training.model, scenario.layout
    for index in range(len(model.layers)) if len(model.layers) > 1 else ():
        with suppress(EquivCheckError):
            training = _with_model(scenario.training, _without_layer(model, index))
            parallelisms = tuple(_without_entry(each, index) for each in layout.parallelisms)
            yield replace(scenario, training=training, layout=replace(layout, parallelisms=parallelisms))


def _in_fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    for steps in range(1, scenario.training.steps):
        with suppress(EquivCheckError):
            yield replace(scenario, training=replace(scenario.training, steps=steps))


def _of_less_data(scenario: Scenario) -> Iterator[Scenario]:
    """Use fewer microbatches, and fewer rows in them. Too few rows are repaired to the layout's minimum."""
    training = scenario.training
    rows = training.data.microbatches
    shorter = [(1,), (2,), rows[:1], *(rows[:index] + rows[index + 1 :] for index in range(len(rows)))]
    shorter += [(1,) * len(rows), (2,) * len(rows)]
    shorter += [(*rows[:index], fewer, *rows[index + 1 :]) for index in range(len(rows)) for fewer in (1, rows[index] // 2)]
    for microbatches in dict.fromkeys(shorter):
        with suppress(EquivCheckError):
            yield replace(scenario, training=replace(training, data=replace(training.data, microbatches=microbatches)))


def _of_less_width(scenario: Scenario) -> Iterator[Scenario]:
    models = _narrower(scenario.training.model)
    return (replace(scenario, training=_with_model(scenario.training, model)) for model in models)


def _of_plainer_layers(scenario: Scenario) -> Iterator[Scenario]:
    for layout in (scenario.layout, *_cut_as_linears(scenario.layout)):
        for model in _plainer(scenario.training):
            with suppress(EquivCheckError):
                yield replace(scenario, training=_with_model(scenario.training, model), layout=layout)


def _of_other_models(scenario: Scenario) -> Iterator[Scenario]:
    """Move toward an MLP: rows instead of sequences, fewer tokens and positions, smaller layers."""
    training = scenario.training
    for changed in (with_linear_layers(training), with_real_targets(with_linear_layers(training))):
        with suppress(EquivCheckError):
            yield replace(scenario, training=changed)
    for model in _fewer_tokens(training.model):
        yield replace(scenario, training=_with_model(training, model))


def _with_fewer_settings(scenario: Scenario) -> Iterator[Scenario]:
    for training in with_defaults(scenario.training):
        with suppress(EquivCheckError):
            yield replace(scenario, training=training)
    yield from (replace(scenario, layout=layout) for layout in with_defaults(scenario.layout))


def _in_plain_order(scenario: Scenario) -> Iterator[Scenario]:
    yield replace(scenario, schedule_seed=0)


CHANGES: tuple[Change[Scenario], ...] = (
    _without_resume,
    _eagerly,
    _on_fewer_ranks,
    _of_other_models,
    _of_fewer_layers,
    _in_fewer_steps,
    _of_less_data,
    _of_less_width,
    _of_plainer_layers,
    _with_fewer_settings,
    _in_plain_order,
)
"""Changes, most effective first."""


@singledispatch
def changes_for(case: Checkable) -> tuple[Change[Any], ...]:
    """Return the kinds of changes to make a scenario or a tensor program simpler, most effective first."""
    raise TypeError(f"case is not valid: its class is {type(case).__name__}. Expected Scenario or TensorProgram")


@changes_for.register
def _(_scenario: Scenario) -> tuple[Change[Any], ...]:
    return CHANGES


@changes_for.register
def _(_program: TensorProgram) -> tuple[Change[Any], ...]:
    return PROGRAM_CHANGES


def _without_layer(model: Model, index: int) -> Model:
    """Return the model without a layer.

    If the widths of the other layers do not match, no layer is residual or shares a weight.
    """
    features = model.features if index else model.in_features(1)
    layers = tuple(_after(layer, index) for number, layer in enumerate(model.layers) if number != index)
    with suppress(EquivCheckError):
        return replace(model, features=features, layers=layers)
    return replace(model, features=features, layers=tuple(layer.with_fields(residual=False, shares=None) for layer in layers))


def _after(layer: AnyLayer, index: int) -> AnyLayer:
    if layer.shares is None or layer.shares < index:
        return layer
    return layer.with_fields(shares=None if layer.shares == index else layer.shares - 1)


def _cut_as_linears(layout: Layout) -> Iterator[Layout]:
    """Split the inner parts of all layers as linear layers are split."""
    for split in (Split.COLWISE, Split.ROWWISE):
        changed = tuple(
            _with_split(each, split) if isinstance(each, PlannedParallelism) else each for each in layout.parallelisms
        )
        if changed != layout.parallelisms:
            yield replace(layout, parallelisms=changed)


def _with_split(tensor_parallel: PlannedParallelism, split: Split) -> PlannedParallelism:
    plan = (replace(entry, split=split) if entry.split is Split.HEADS_OR_HIDDEN else entry for entry in tensor_parallel.plan)
    return replace(tensor_parallel, plan=tuple(plan))


def _without_entry(parallelism: Any, index: int) -> Any:
    if isinstance(parallelism, Pipeline):
        return replace(parallelism, boundaries=())
    if not isinstance(parallelism, PlannedParallelism) or len(parallelism.plan) == 1:
        return parallelism
    plan = [*parallelism.plan[:index], *parallelism.plan[index + 1 :]]
    plan[-1] = replace(plan[-1], output=ActivationSharding.REPLICATED)
    return replace(parallelism, plan=tuple(plan))


def _with_model(training: Training, model: Model) -> Training:
    """Return the training with another model, or unchanged if its optimizer does not accept the model."""
    with suppress(EquivCheckError):
        return replace(training, model=model)
    return training


def _narrower(model: Model) -> Iterator[Model]:
    """Yield models with smaller widths: all layers together, then one by one."""
    for width in _WIDTHS:
        yield replace(model, features=width, layers=tuple(layer.with_fields(width=width) for layer in model.layers))
    for width in _WIDTHS:
        with suppress(EquivCheckError):
            yield replace(model, features=width)
        for index, layer in enumerate(model.layers):
            with suppress(EquivCheckError):
                layers = (*model.layers[:index], layer.with_fields(width=width), *model.layers[index + 1 :])
                yield replace(model, layers=layers)


def _fewer_tokens(model: Model) -> Iterator[Model]:
    """Yield models with fewer positions, a smaller vocabulary, and smaller inner sizes of layers."""
    for length in _WIDTHS if model.length is not None else ():
        with suppress(EquivCheckError):
            yield replace(model, length=length)
    sources = () if model.source is None else (replace(model.source, vocabulary=size, padding=None) for size in _VOCABULARIES)
    for source in sources:
        yield replace(model, source=source)
    for index, layer in enumerate(model.layers):
        for changes in _LESS_WITHIN:
            with suppress(EquivCheckError):
                yield replace(model, layers=(*model.layers[:index], layer.with_fields(**changes), *model.layers[index + 1 :]))


def _plainer(training: Training) -> Iterator[Model]:
    """Drop the options of all layers, then the options of one layer."""
    model = training.model
    plain = tuple(Layer(width=width, bias=training.optimizer.updates_vectors) for width in model.widths[1:])
    yield replace(model, layers=plain)
    for index in range(len(plain)):
        with suppress(EquivCheckError):
            yield replace(model, layers=(*model.layers[:index], plain[index], *model.layers[index + 1 :]))


def with_defaults(value: T) -> Iterator[T]:
    """Yield copies of an object. Each sets one field to its default, in the object itself or in a nested object."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            for changed in with_defaults(item):
                yield (*value[:index], changed, *value[index + 1 :])  # type: ignore[misc]
    elif is_dataclass(value) and not isinstance(value, (type, Mesh, LayerPlan)):
        yield from _settings_at_default(value)


def _settings_at_default(value: Any) -> Iterator[Any]:
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_default(field, inner):
            continue
        if field.default is not MISSING:
            with suppress(EquivCheckError):
                yield replace(value, **{field.name: field.default})
        for changed in with_defaults(inner):
            with suppress(EquivCheckError):
                yield replace(value, **{field.name: changed})
