"""What issues on file ask of plans of tensor parallelism whose hooks are compiled, each by itself.

Dynamo looks into no module of an FSDP1 without original parameters. What it compiles there are the functions by which
`parallelize_module` prepares the inputs and outputs of modules; and nothing in a layer that activation checkpointing runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.plan.layers import plan_over_ranks
from equivcheck.layouts.base.plan.linears import Passage, head_passage, passage
from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.parallelisms.pipeline.known import ENDS_IN_VIEW
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
from equivcheck.training.layers.registry import kind_of
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS
from equivcheck.worlds.trace.differences import Difference, Divergence


@need
def hooks_compiled_one_by_one(scenario: Scenario) -> bool:
    """A compiled forward under FSDP1 without original parameters, over a plan of tensor parallelism."""
    layout = scenario.layout
    looks_into_hooks = any(not parallelism.use_orig_params for parallelism in layout.of(FSDP1))
    return looks_into_hooks and layout.execution.compile is not Compile.NONE and layout.has(TensorParallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hooked:
    """A linear of a plan whose hooks are compiled."""

    inputs: int
    """How many features of its input the last of two ranks has."""
    is_cut: bool
    """Whether its input has all features, which a hook then cuts."""
    outputs: int
    """Features that it gives, over all ranks."""
    has_bias: bool
    """Whether it adds a bias, so that what it gives of sequences is a view of rows and positions as one dim."""


def _hooked(model: Model, plan: TensorParallel, execution: Execution) -> Iterator[_Hooked]:
    """All of them, in the order of forward."""
    shapes = {parameter.full_name: parameter.shape for parameter in parameters_of(model)}
    for index, (layer, entry, sharding) in enumerate(zip(model.layers, plan.plan, inputs_of(model, plan), strict=False)):
        if entry.split is Split.OUTSIDE or execution.checkpoints(index):
            continue
        for part in kind_of(layer).parts(layer):
            name = f"layers.{index}.{part.name}"
            inputs = model.inputs(index) if part.reads_input else shapes[f"{name}.weight"][1]
            outputs = model.inputs(index + 1) if part.gives_output else shapes[f"{name}.weight"][0]
            yield _linear(passage(model, part, entry, sharding), inputs, outputs, has_bias=f"{name}.bias" in shapes)
    if model.head is not None and plan.head is not Split.OUTSIDE:
        yield _linear(head_passage(model, plan), model.inputs(len(model.layers)), model.outputs, has_bias=model.head.bias)


def _linear(told: Passage, inputs: int, outputs: int, *, has_bias: bool) -> _Hooked:
    has_part = told.input is ActivationSharding.FEATURES
    return _Hooked(
        inputs=chunk_sizes(inputs, 2)[-1] if has_part else inputs,
        is_cut=told.split is Split.ROW and not has_part,
        outputs=outputs,
        has_bias=has_bias,
    )


def _hooked_as_one(scenario: Scenario) -> list[_Hooked]:
    """Those of a forward that is compiled as a whole: layers that are compiled by themselves have no sizes that are symbols."""
    layout, model = scenario.layout, scenario.training.model
    if layout.execution.per_layer:
        return []
    return [each for plan in layout.of(TensorParallel) for each in _hooked(model, plan, layout.execution)]


def _rows(scenario: Scenario) -> list[int]:
    """Those of each microbatch on one rank."""
    return [rows // scenario.layout.num_data_ranks for rows in scenario.training.data.microbatches]


@need
def two_features_cut_after_others(scenario: Scenario) -> bool:
    """The input of a linear is cut from two features to one, after a hook was compiled for another number of them."""
    found, recompiled = _hooked_as_one(scenario), len(set(_rows(scenario))) > 1
    return scenario.layout.mesh.size(TP) == 2 and any(
        each.is_cut and each.inputs == 2 and any(other.inputs != 2 for other in (found if recompiled else found[:index]))
        for index, each in enumerate(found)
    )


@need
def viewed_sequences_of_another_size(scenario: Scenario) -> bool:
    """A compiled hook takes sequences from a linear with a bias after others of another number of rows.

    A length of one, or of as many positions as rows or features, has the symbol of those.
    """
    rows, length = _rows(scenario), scenario.training.model.length
    again = {size for index, size in enumerate(rows) if set(rows[:index]) - {size}} - {1, length}
    is_symbol = length not in (None, 1) and bool(again)
    return is_symbol and any(each.has_bias and each.outputs != length for each in _hooked_as_one(scenario))


@need
def viewed_sequences_of_other_features(scenario: Scenario) -> bool:
    """The first hook that is compiled for features of another number takes sequences from a linear with a bias, before others.

    The first hook of all takes no such view, or those features are as many as rows or positions, and have the symbol of these.
    """
    rows, length, found = _rows(scenario), scenario.training.model.length, _hooked_as_one(scenario)
    index = next((index for index, each in enumerate(found) if each.outputs not in (1, found[0].outputs)), None)
    if length is None or index is None:
        return False
    second, comes_again = found[index], scenario.training.steps > 1 or len(set(rows)) < len(rows)
    has_symbol = not found[0].has_bias or second.outputs in (length, *rows)
    others = found if comes_again else found[index:]
    return second.has_bias and has_symbol and any(each.outputs not in (1, second.outputs) for each in others)


@need
def pending_before_a_compiled_hook(scenario: Scenario) -> bool:
    """A layer that is computed once more in backward returns a sum still to be waited for, and a compiled hook takes it."""
    return _last_pending(scenario) is not None


@show
def before_a_compiled_hook(scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor is of a layer that returns such a sum, or of what comes before; only units of single layers have no gradient."""
    last, layer = _last_pending(scenario), layer_of(divergence.tensor)
    has_units = any(parallelism.wrapping is Wrapping.PER_LAYER for parallelism in scenario.layout.of(FSDP1))
    if last is None or (divergence.difference is Difference.MISSING and not has_units):
        return False
    return divergence.tensor in (EMBEDDING, POSITIONS) if layer is None else layer <= last


def _last_pending(scenario: Scenario) -> int | None:
    """Index of the last layer whose sum a compiled hook takes; None where there is none."""
    model, plan, execution = scenario.training.model, plan_over_ranks(scenario.layout), scenario.layout.execution
    if plan is None:
        return None
    hooks = [entry.split is not Split.OUTSIDE and not execution.checkpoints(index) for index, entry in enumerate(plan.plan)]
    hooks.append(model.head is not None and plan.head is not Split.OUTSIDE and not execution.per_layer)
    pending = (
        index
        for index, (layer, entry) in enumerate(zip(model.layers, plan.plan, strict=False))
        if execution.checkpoints(index) and entry.split in (Split.ROW, Split.WITHIN) and _ends_in_sum(layer) and hooks[index + 1]
    )
    return max(pending, default=None)


def _ends_in_sum(layer: AnyLayer) -> bool:
    """Whether nothing but a view is made of what its last linear gives."""
    seen = layer.having(shape_op=None) if layer.shape_op in ENDS_IN_VIEW else layer
    return seen.ends_in_linear and seen.auxiliary is None
