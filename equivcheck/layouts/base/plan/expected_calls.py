"""Expected calls for redistributing activations and their gradients under a plan.

Layers pass local tensors to each other, so every redistribution belongs to one linear, norm or embedding.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.passes import Passes
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.partition import chunk_size, shard_dim, shard_shape
from equivcheck.layouts.base.plan.linears import (
    BY_ROWS,
    COLUMN,
    OF_SHARDING,
    ROW,
    WHOLE,
    ActivationPlacement,
    LinearPlacements,
    LinearPlan,
    head_plan,
    linear_plan,
)
from equivcheck.layouts.base.plan.rules import inputs_of, num_routing_weights
from equivcheck.layouts.base.positions import own_length
from equivcheck.scenario import FSDP1, AnyLayer, PlannedParallelism, Split, Wrapping
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.facts import LayerLinear, runs_at
from equivcheck.training.layers.registry import layer_kind


def differentiates_input(view: RankView, index: int, passes: Passes) -> bool:
    """Whether a layer's input requires a gradient in some passes.

    With one FSDP1 unit for the whole model, every parameter is a view of the flat parameter, so gradients also pass through
    frozen layers.
    """
    flat = any(fsdp.use_orig_params and fsdp.wrapping is Wrapping.ROOT_ONLY for fsdp in view.layout.of(FSDP1))
    return (flat and index > 0) or view.is_differentiated(index - 1, passes)


def sharded_held(view: RankView, parallelism: PlannedParallelism) -> Iterator[Held]:
    """Yield the rank's parameters with their local shapes under the plan."""
    parts, index = view.layout.mesh.size(TP), view.index(TP)
    for held in view.held:
        dim = shard_dim(parallelism, held.parameter)
        yield held if dim is None or parts == 1 else replace(held, shape=shard_shape(held.shape, dim, parts, index), cut=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPasses:
    """Forward and backward passes through a linear, for predicting its collective calls."""

    module: Passes
    """Passes through the model, or through the pipeline stage that contains the linear."""
    rows: int
    """Rows on all ranks of the tensor-parallel group together, multiplied by the sequence length if rows are sequences."""
    inputs: int
    """Full number of input features."""
    width: int
    """Full number of output features."""
    bias: bool = False
    """Whether the linear has a bias."""
    trains_weight: bool = False
    """Whether backward computes the weight's gradient. Another layer may own the weight."""
    trains_bias: bool = False
    """Whether backward computes the bias's gradient."""
    differentiates: bool = False
    """Whether the linear's input requires a gradient."""
    recomputed: bool = False
    """Whether backward gathers the linear's input again, because activation checkpointing recomputes the layer."""
    completed: bool = False
    """Whether the recomputation also runs the linear itself, because later operations save tensors for backward."""

    @property
    def trained(self) -> bool:
        """Whether backward computes any parameter gradient."""
        return self.trains_weight or self.trains_bias


class PlannedCalls:
    """Predicts the collective calls of a tensor-parallel plan in each training step.

    Subclasses add calls for linears and gradients.
    """

    adds_bias_to_sums: ClassVar[bool] = False
    """Whether a bias is added after partial sums are reduced, so its gradient does not need that of the partial sums."""

    def __init__(self, view: RankView, parallelism: PlannedParallelism) -> None:
        self.view, self.plan = view, parallelism.plan
        self.parts = view.layout.mesh.size(TP)
        self.axes = view.axes(TP)
        self.parallelism, self.inputs = parallelism, inputs_of(view.training.model, parallelism)
        self.length = own_length(view)
        self._num_positions = 1 if self.length is None else self.length
        self.ledger = Ledger()

    def totals(self) -> Totals:
        """Expected collective calls in all steps."""
        training = self.view.training
        for step in range(training.steps):
            for passes in self.view.passes_at(step):
                if self.parts > 1:
                    self._module(passes)
                if self.parallelism.loss_parallel and passes.has_loss:
                    self.loss(passes, passes.loss_rows * self._num_positions)
            if self.parts > 1:
                self.after_backward(step)
        return self.ledger.totals

    def loss(self, passes: Passes, rows: int) -> None:
        """Add the calls for a loss on vocabulary-parallel logits with `rows` rows in all passes together."""

    def after_linear(self, passes: LinearPasses, plan: LinearPlan, linear: LinearPlacements) -> None:
        """Add a linear's calls, except those that redistribute activations. Subclasses override this method."""

    def after_backward(self, step: int) -> None:
        """Add the calls for gradients at the end of a step. Subclasses override this method."""

    def computes_as(self, plan: LinearPlan, passes: LinearPasses) -> LinearPlacements:  # noqa: ARG002 - for overriding methods
        """Return the placements of a linear's input, output and input gradient under the plan."""
        if plan.is_by_rows:
            return BY_ROWS
        return {Split.COLWISE: COLUMN, Split.ROWWISE: ROW}.get(plan.split, WHOLE)

    def _module(self, passes: Passes) -> None:
        if passes.span.is_first:
            self._embedding(passes)
        for index in passes.span.layers:
            self._layer(passes, index)
        if passes.span.is_last:
            self._head(passes)

    def _embedding(self, passes: Passes) -> None:
        model, split = self.view.training.model, self.parallelism.source
        if model.source is None or self.length is None or split is Split.NOT_IN_PLAN:
            return
        linear_passes = LinearPasses(
            module=passes,
            rows=passes.rows * self._num_positions,
            inputs=model.source.vocabulary,
            width=model.features,
            trains_weight=not passes.infers and (not model.source.frozen or self.view.computes_frozen_gradients(None)),
        )
        made = {Split.ROWWISE: ROW.made, Split.COLWISE: COLUMN.made}.get(split, ActivationPlacement.REPLICATED)
        self._outputs(linear_passes, made, OF_SHARDING[self.inputs[0]])
        if model.source.learned_positions:
            self._outputs(replace(linear_passes, rows=self.length), ActivationPlacement.REPLICATED, OF_SHARDING[self.inputs[0]])

    def _head(self, passes: Passes) -> None:
        model, last = self.view.training.model, len(self.plan)
        if model.head is None or self.parallelism.head is Split.NOT_IN_PLAN:
            return
        ties_frozen = model.head.tied and model.source is not None and model.source.frozen
        linear_passes = LinearPasses(
            module=passes,
            rows=passes.rows * self._num_positions,
            inputs=model.in_features(last),
            width=prod(model.output_shape),
            bias=model.head.bias,
            trains_weight=not passes.infers and (not ties_frozen or self.view.computes_frozen_gradients(None)),
            trains_bias=not passes.infers and model.head.bias,
            differentiates=(not passes.infers and model.head.norm is not None) or differentiates_input(self.view, last, passes),
        )
        self._linear(linear_passes, head_plan(model, self.parallelism))

    def _layer(self, passes: Passes, index: int) -> None:
        if self.plan[index].split is Split.NOT_IN_PLAN:
            return
        model, plan = self.view.training.model, self.plan[index]
        layer, inputs, outputs = model.layers[index], model.in_features(index), model.in_features(index + 1)
        parameters = layer_kind(layer).parameters(layer, inputs)
        shapes = {parameter.name: parameter.shape for parameter in parameters}
        trains_frozen = self.view.computes_frozen_gradients(index)
        without_gradient = {each.name for each in parameters if each.is_frozen and not trains_frozen}
        owners = (index, index if layer.shares is None else layer.shares)
        trained, trains_shared = (not passes.infers and self._trains(owner) for owner in owners)
        # A layer may own no parameter, or only those of an auxiliary linear that does not run in this step.
        trained = trained and any(parameter.is_used_at(passes.step) for parameter in parameters)
        differentiates = differentiates_input(self.view, index, passes) or (layer.norm is not None and trained)
        parts = [part for part in layer_kind(layer).linears(layer) if runs_at(part.runs, passes.step)]
        keeps = differentiates or trains_shared or (trained and _keeps_for_its_own(layer, parts, shapes))
        recomputed = self.view.layout.execution.checkpoints(index) and keeps
        linear_passes = LinearPasses(
            module=passes,
            rows=passes.rows * self._num_positions,
            inputs=inputs,
            width=outputs,
            trains_weight=trained,
            differentiates=differentiates,
            recomputed=recomputed,
            completed=recomputed and layer.dropout > 0,
        )
        weights = num_routing_weights(layer, plan.split)
        if weights is not None:
            self._region(linear_passes, weights, OF_SHARDING[self.inputs[index]], OF_SHARDING[plan.output])
            return
        for part in parts:
            weight = f"{part.name}.weight"
            # A shared weight has the shape that the layer's own weight would have.
            width, features = shapes.get(weight, (outputs, inputs))
            has_bias = f"{part.name}.bias" in shapes
            of_part = replace(
                linear_passes,
                inputs=features,
                width=width,
                bias=has_bias,
                trains_weight=trained and weight not in without_gradient if weight in shapes else trains_shared,
                trains_bias=trained and has_bias,
                differentiates=differentiates or (trained and not part.reads_input),
                completed=recomputed and (part is not parts[-1] or part.activated or layer.dropout > 0),
            )
            self._linear(of_part, linear_plan(model, part, plan, self.inputs[index]))

    def _trains(self, index: int) -> bool:
        """Whether backward computes gradients for a layer's own parameters."""
        return not self.view.training.model.layers[index].frozen or self.view.computes_frozen_gradients(index)

    def _region(self, passes: LinearPasses, weights: int, before: ActivationPlacement, after: ActivationPlacement) -> None:
        """Add the calls of a layer whose ranks compute partial sums.

        Gradients of replicated inputs and weights are summed over ranks.
        """
        whole, pending = ActivationPlacement.REPLICATED, ActivationPlacement.PARTIAL
        self._move(passes, before, whole, passes.inputs, times=1 + passes.recomputed)
        self._move(passes, pending, whole, passes.inputs, times=int(passes.differentiates))
        self._move(passes, pending, whole, weights, times=int(passes.differentiates or passes.trained))
        self._outputs(passes, pending, after)

    def _linear(self, passes: LinearPasses, plan: LinearPlan) -> None:
        linear = self.computes_as(plan, passes)
        self._activations(passes, linear, OF_SHARDING[plan.input], OF_SHARDING[plan.output])
        self.after_linear(passes, plan, linear)

    def _activations(
        self, passes: LinearPasses, linear: LinearPlacements, before: ActivationPlacement, after: ActivationPlacement
    ) -> None:
        """Add calls that redistribute input and output, then their gradients in backward."""
        self._move(passes, before, linear.wanted, passes.inputs, times=1 + passes.recomputed)
        self._outputs(passes, linear.made, after)
        if passes.differentiates:
            self._move(passes, linear.input_gradient, before, passes.inputs)

    def _outputs(self, passes: LinearPasses, made: ActivationPlacement, after: ActivationPlacement) -> None:
        """Add calls that redistribute the output, then its gradient in backward."""
        self._move(passes, made, after, passes.width, times=1 + passes.completed)
        is_partial = made is ActivationPlacement.PARTIAL
        has_bias_inside = not (is_partial and self.adds_bias_to_sums)
        if passes.differentiates or passes.trains_weight or (passes.trains_bias and has_bias_inside):
            self._move(passes, after, ActivationPlacement.REPLICATED if is_partial else made, passes.width)

    def _move(
        self, passes: LinearPasses, source: ActivationPlacement, target: ActivationPlacement, features: int, times: int = 1
    ) -> None:
        """Redistribute between two placements.

        A change between two sharded placements is a gather, because gloo has no all-to-all.
        """
        if source is target or source is ActivationPlacement.REPLICATED:
            return
        if source is ActivationPlacement.PARTIAL:
            op, num_elements = self._reduced(passes, target, features)
        elif source is ActivationPlacement.ROWS:
            op, num_elements = "all_gather", self._rows_of_part(passes) * self.gathered_features(features, target)
        else:
            op, num_elements = "all_gather", passes.rows * chunk_size(features, self.parts)
        self.note(passes, op, num_elements, times)

    def gathered_features(self, features: int, target: ActivationPlacement) -> int:  # noqa: ARG002 - used by overriding methods
        """Return the number of features if ranks gather activations sharded by rows.

        Subclasses may return a padded number, depending on the placement `target` after the gather.
        """
        return features

    def note(self, passes: LinearPasses, op: str, num_elements: int, times: int = 1) -> None:
        """Add `times` calls of operation `op` with `num_elements` elements each, in each pass."""
        num_calls = times * passes.module.times
        if num_calls:
            self.ledger.note(passes.module.step, op, self.axes, num_elements * self.view.item_bytes * num_calls, num_calls)

    def _reduced(self, passes: LinearPasses, target: ActivationPlacement, features: int) -> tuple[str, int]:
        """Return the reduction and its number of elements. A reduce-scatter is padded to equal shards."""
        if target is ActivationPlacement.REPLICATED:
            return "all_reduce.sum", passes.rows * features
        if target is ActivationPlacement.ROWS:
            return "reduce_scatter.sum", self._rows_of_part(passes) * self.parts * features
        return "reduce_scatter.sum", passes.rows * chunk_size(features, self.parts) * self.parts

    def _rows_of_part(self, passes: LinearPasses) -> int:
        """Return the number of rows on the first rank if activations are sharded by rows.

        Sequences are sharded by positions and keep all rows.
        """
        length = passes.rows if self.length is None else self.length
        return passes.rows // length * chunk_size(length, self.parts) if length else 0


def _keeps_for_its_own(layer: AnyLayer, parts: Sequence[LayerLinear], shapes: Container[str]) -> bool:
    """Whether a layer saves tensors for its own gradients. A layer that only owns a bias saves none."""
    has_weights = layer.shares is None or any(f"{part.name}.weight" in shapes for part in parts)
    return has_weights or parts[-1].activated or layer.dropout > 0
