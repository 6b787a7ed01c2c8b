"""Predicates on hooks of tensor parallelism that Dynamo compiles one by one, for the field `needs` of known issues.

Dynamo skips all modules in FSDP1 without `use_orig_params`. It compiles only the hooks by which `parallelize_module` prepares
inputs and outputs, and no hook in a layer with activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.plan.layers import plan_over_ranks
from equivcheck.layouts.base.plan.linears import LinearPlan, head_plan, linear_plan
from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.parallelisms.pipeline.views import ENDS_IN_VIEW
from equivcheck.scenario import (
    FSDP1,
    ActivationSharding,
    AnyLayer,
    Compile,
    Execution,
    Model,
    Scenario,
    Split,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.parameters import layer_of, parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS
from equivcheck.worlds.trace.differences import Difference, Divergence


@need
def hooks_compiled_one_by_one(scenario: Scenario) -> bool:
    """Whether FSDP1 without `use_orig_params` is applied over tensor parallelism and compiled."""
    layout = scenario.layout
    looks_into_hooks = any(not parallelism.use_orig_params for parallelism in layout.of(FSDP1))
    return looks_into_hooks and layout.execution.compile is not Compile.NONE and layout.has(TensorParallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HookedLinear:
    """A linear whose hooks are compiled."""

    inputs: int
    """Input features on the last of two ranks."""
    is_split: bool
    """Whether a hook splits the input, which has all features."""
    outputs: int
    """Output features over all ranks."""
    has_bias: bool
    """Whether the linear adds a bias. Its output for sequences is then a view, with rows and positions in one dim."""


def _linears_with_hooks(model: Model, plan: TensorParallel, execution: Execution) -> Iterator[_HookedLinear]:
    shapes = {parameter.full_name: parameter.shape for parameter in parameters_of(model)}
    for index, (layer, entry, sharding) in enumerate(zip(model.layers, plan.plan, inputs_of(model, plan), strict=False)):
        if entry.split is Split.NOT_IN_PLAN or execution.checkpoints(index):
            continue
        for part in layer_kind(layer).linears(layer):
            name = f"layers.{index}.{part.name}"
            inputs = model.in_features(index) if part.reads_input else shapes[f"{name}.weight"][1]
            outputs = model.in_features(index + 1) if part.gives_output else shapes[f"{name}.weight"][0]
            yield _linear(linear_plan(model, part, entry, sharding), inputs, outputs, has_bias=f"{name}.bias" in shapes)
    if model.head is not None and plan.head is not Split.NOT_IN_PLAN:
        outputs = prod(model.output_shape)
        yield _linear(head_plan(model, plan), model.in_features(len(model.layers)), outputs, has_bias=model.head.bias)


def _linear(plan: LinearPlan, inputs: int, outputs: int, *, has_bias: bool) -> _HookedLinear:
    has_part = plan.input is ActivationSharding.FEATURES
    return _HookedLinear(
        inputs=chunk_sizes(inputs, 2)[-1] if has_part else inputs,
        is_split=plan.split is Split.ROWWISE and not has_part,
        outputs=outputs,
        has_bias=has_bias,
    )


def _linears_compiled_together(scenario: Scenario) -> list[_HookedLinear]:
    layout, model = scenario.layout, scenario.training.model
    # Layers that are compiled one by one have no symbolic sizes.
    if layout.execution.per_layer:
        return []
    return [each for plan in layout.of(TensorParallel) for each in _linears_with_hooks(model, plan, layout.execution)]


def _rows(scenario: Scenario) -> list[int]:
    return [rows // scenario.layout.num_data_ranks for rows in scenario.training.data.microbatches]


@need
def two_features_cut_after_others(scenario: Scenario) -> bool:
    """Whether a compiled hook of tensor parallelism shards two input features over two ranks.

    The hook must have been compiled before for another number of features.
    """
    found, recompiled = _linears_compiled_together(scenario), len(set(_rows(scenario))) > 1
    return scenario.layout.mesh.size(TP) == 2 and any(
        each.is_split and each.inputs == 2 and any(other.inputs != 2 for other in (found if recompiled else found[:index]))
        for index, each in enumerate(found)
    )


@need
def viewed_sequences_of_another_size(scenario: Scenario) -> bool:
    """Whether compiled hooks run again with another number of rows, and a linear with a bias returns sequences.

    This number must not be 1 or the sequence length. The sequence length must not be 1 or the linear's number of output features.
    Otherwise Dynamo uses a constant, or one symbol for both sizes.
    """
    rows, length = _rows(scenario), scenario.training.model.length
    again = {size for index, size in enumerate(rows) if set(rows[:index]) - {size}} - {1, length}
    is_symbol = length not in (None, 1) and bool(again)
    return is_symbol and any(each.has_bias and each.outputs != length for each in _linears_compiled_together(scenario))


@need
def viewed_sequences_of_other_features(scenario: Scenario) -> bool:
    """Whether compiled hooks on sequences see the number of output features change at two linears.

    The linear with the first change must have a bias. The very first linear must have none, unless the other one has as many
    output features as there are rows or positions. Dynamo uses one symbol for equal sizes.
    """
    rows, length, found = _rows(scenario), scenario.training.model.length, _linears_compiled_together(scenario)
    index = next((index for index, each in enumerate(found) if each.outputs not in (1, found[0].outputs)), None)
    if length is None or index is None:
        return False
    second, comes_again = found[index], scenario.training.steps > 1 or len(set(rows)) < len(rows)
    has_symbol = not found[0].has_bias or second.outputs in (length, *rows)
    others = found if comes_again else found[index:]
    return second.has_bias and has_symbol and any(each.outputs not in (1, second.outputs) for each in others)


@need
def pending_before_a_compiled_hook(scenario: Scenario) -> bool:
    """Whether a compiled hook takes the output of a recomputed layer whose all-reduce has not finished."""
    return _last_pending(scenario) is not None


@show
def before_a_compiled_hook(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the diverged tensor belongs to a recomputed layer in front of a compiled hook, or to an earlier layer.

    The recomputed layer's all-reduce has not finished when the hook runs. A missing gradient counts only if each layer is an
    FSDP1 unit.
    """
    last, layer = _last_pending(scenario), layer_of(divergence.tensor)
    has_units = any(parallelism.wrapping is Wrapping.PER_LAYER for parallelism in scenario.layout.of(FSDP1))
    if last is None or (divergence.difference is Difference.MISSING and not has_units):
        return False
    return divergence.tensor in (EMBEDDING, POSITIONS) if layer is None else layer <= last


def _last_pending(scenario: Scenario) -> int | None:
    model, plan, execution = scenario.training.model, plan_over_ranks(scenario.layout), scenario.layout.execution
    if plan is None:
        return None
    hooks = [entry.split is not Split.NOT_IN_PLAN and not execution.checkpoints(index) for index, entry in enumerate(plan.plan)]
    hooks.append(model.head is not None and plan.head is not Split.NOT_IN_PLAN and not execution.per_layer)
    pending = (
        index
        for index, (layer, entry) in enumerate(zip(model.layers, plan.plan, strict=False))
        if execution.checkpoints(index)
        and entry.split in (Split.ROWWISE, Split.HEADS_OR_HIDDEN)
        and _ends_in_sum(layer)
        and hooks[index + 1]
    )
    return max(pending, default=None)


def _ends_in_sum(layer: AnyLayer) -> bool:
    seen = layer.with_fields(shape_op=None) if layer.shape_op in ENDS_IN_VIEW else layer
    return seen.ends_in_linear and seen.auxiliary is None
