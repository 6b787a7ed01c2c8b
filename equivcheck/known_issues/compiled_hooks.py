"""What issues on file ask of plans of tensor parallelism whose hooks are compiled, each by itself.

Dynamo looks into no module of an FSDP1 without original parameters. What it compiles there are the functions by which
`parallelize_module` prepares the inputs and outputs of modules; and nothing in a layer that activation checkpointing runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.layers.parameters import layer_of, parameters_of
from equivcheck.layers.registry import kind_of
from equivcheck.layers.token_facts import EMBEDDING, POSITIONS
from equivcheck.layouts.known_predicates import need, show
from equivcheck.layouts.partition import chunk_sizes
from equivcheck.parallelisms.pipeline.known import ENDS_IN_VIEW
from equivcheck.parallelisms.tensor_parallel.passage import Passage, head_passage, passage
from equivcheck.parallelisms.tensor_parallel.plans import inputs_of, is_outside
from equivcheck.parallelisms.tensor_parallel.sites import plan_over_ranks
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
from equivcheck.trace.differences import Difference, Divergence


@need
def hooks_compiled_one_by_one(scenario: Scenario) -> bool:
    """A compiled forward under FSDP1 without original parameters, over a plan of tensor parallelism."""
    layout = scenario.layout
    looks_into_hooks = any(not parallelism.use_orig_params for parallelism in layout.of(FSDP1))
    return looks_into_hooks and layout.execution.compile is not Compile.NONE and layout.has(TensorParallel)


@need
def two_features_cut_after_others(scenario: Scenario) -> bool:
    """The input of a linear is cut from two features to one, after a hook was compiled for another number of them.

    Layers that are compiled by themselves have no sizes that are symbols.
    """
    plan, layout = plan_over_ranks(scenario.layout), scenario.layout
    if plan is None or layout.mesh.size(TP) != 2 or layout.execution.per_layer:
        return False
    found = list(_given(scenario.training.model, plan, layout.execution))
    recompiled = len(set(scenario.training.data.microbatches)) > 1
    return any(
        size == 2 and is_cut and any(other != size for other, _ in (found if recompiled else found[:index]))
        for index, (size, is_cut) in enumerate(found)
    )


def _given(model: Model, plan: TensorParallel, execution: Execution) -> Iterator[tuple[int, bool]]:
    """For each linear with compiled hooks, how many features the last of two ranks has of its input, and whether they are cut."""
    shapes = {parameter.full_name: parameter.shape for parameter in parameters_of(model)}
    for index, (layer, entry, sharding) in enumerate(zip(model.layers, plan.plan, inputs_of(model, plan), strict=False)):
        if entry.split is Split.OUTSIDE or execution.checkpoints(index):
            continue
        for part in kind_of(layer).parts(layer):
            features = model.inputs(index) if part.reads_input else shapes[f"layers.{index}.{part.name}.weight"][1]
            yield _arriving(passage(model, part, entry, sharding), features)
    if model.head is not None and plan.head is not Split.OUTSIDE:
        yield _arriving(head_passage(model, plan), model.inputs(len(model.layers)))


def _arriving(told: Passage, features: int) -> tuple[int, bool]:
    if told.input is ActivationSharding.FEATURES:
        return chunk_sizes(features, 2)[-1], False
    return features, told.split is Split.ROW


@need
def viewed_sequences_of_another_size(scenario: Scenario) -> bool:
    """A compiled hook takes sequences from a linear with a bias, as a view, after others of another number of rows.

    A length of one, or of as many positions as rows or features, has the symbol of those.
    """
    layout, model = scenario.layout, scenario.training.model
    rows = [rows // layout.num_data_ranks for rows in scenario.training.data.microbatches]
    again = {size for index, size in enumerate(rows) if set(rows[:index]) - {size}} - {1, model.length}
    if layout.execution.per_layer or model.length in (None, 1) or not again:
        return False
    plans = layout.of(TensorParallel)
    return any(model.length != width for plan in plans for width in _biased(model, plan, layout.execution))


def _biased(model: Model, plan: TensorParallel, execution: Execution) -> Iterator[int]:
    """How many features each linear with a bias gives of a plan whose hooks are compiled."""
    for parameter in parameters_of(model):
        is_biased = parameter.name.endswith("bias") and not parameter.is_of_norm
        is_compiled = parameter.layer is None or not execution.recomputes(parameter.layer)
        if is_biased and is_compiled and not is_outside(plan, parameter):
            yield parameter.shape[0]


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
