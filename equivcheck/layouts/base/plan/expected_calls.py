"""What moving activations by a plan communicates: of the input and output of each linear, and of the gradients of both.

Layers hand local tensors to each other, so that every move belongs to one linear, norm or embedding.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView, runs
from equivcheck.layouts.base.partition import chunk_size, cut_dim, part_of
from equivcheck.layouts.base.plan.linears import (
    BY_ROWS,
    COLUMN,
    OF_SHARDING,
    ROW,
    WHOLE,
    ActivationPlacement,
    Linear,
    Passage,
    head_passage,
    passage,
)
from equivcheck.layouts.base.plan.rules import inputs_of, weights_of_addends
from equivcheck.layouts.base.positions import own_length
from equivcheck.scenario import FSDP1, AnyLayer, PlannedParallelism, Split, Wrapping
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.facts import Part
from equivcheck.training.layers.registry import kind_of


def differentiates_input(view: RankView, index: int, step: int) -> bool:
    """Whether the input of a layer requires a gradient in a step.

    Of an FSDP1 around the whole model each parameter is a view of the flat one, and a gradient goes through frozen ones as well.
    """
    flat = any(fsdp.use_orig_params and fsdp.wrapping is Wrapping.WHOLE for fsdp in view.layout.of(FSDP1))
    return (flat and index > 0) or view.differentiates(index - 1, step)


def cut_held(view: RankView, parallelism: PlannedParallelism) -> Iterator[Held]:
    """What the rank holds of each parameter once the plan has cut it."""
    parts, index = view.layout.mesh.size(TP), view.index(TP)
    for held in view.held:
        dim = cut_dim(parallelism, held.parameter)
        yield held if dim is None or parts == 1 else replace(held, shape=part_of(held.shape, dim, parts, index), cut=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One linear in one forward and backward."""

    step: int
    """Step, from 0."""
    rows: int
    """Rows of the microbatch on all ranks of the group together; where they are sequences, their positions."""
    inputs: int
    """Features of the input, all of them."""
    width: int
    """Features of the output, all of them."""
    bias: bool
    """Whether it has a bias."""
    trains_weight: bool
    """Whether the gradient of its weight is computed, which another layer may have."""
    trains_bias: bool
    """Whether that of its bias is."""
    differentiates: bool
    """Whether its input does."""
    recomputed: bool
    """Whether backward asks for its input again."""
    completed: bool
    """Whether it then also computes: it does if something is kept for backward after it."""

    @property
    def trained(self) -> bool:
        """Whether the gradient of any parameter is computed."""
        return self.trains_weight or self.trains_bias


class PlannedCalls:
    """Goes through a training, step by step; a subclass says what more is done for a linear, and for gradients."""

    def __init__(self, view: RankView, parallelism: PlannedParallelism) -> None:
        self.view, self.plan = view, parallelism.plan
        self.parts = view.layout.mesh.size(TP)
        self.axes = view.axes(TP)
        self.parallelism, self.inputs = parallelism, inputs_of(view.training.model, parallelism)
        self.length = own_length(view)
        self.ledger = Ledger()

    def totals(self) -> Totals:
        """The calls of all steps."""
        training = self.view.training
        for step in range(training.steps):
            for microbatch in training.data.microbatches:
                rows = microbatch // self.view.layout.num_data_ranks * (1 if self.length is None else self.length)
                if self.parts > 1:
                    self._model(step, rows)
                if self.parallelism.loss_parallel:
                    self.loss(step, rows)
            if self.parts > 1:
                self.after_backward(step)
        return self.ledger.totals

    def loss(self, step: int, rows: int) -> None:
        """Note what the loss of logits in parts communicates."""

    def after_linear(self, once: Pass, told: Passage, linear: Linear) -> None:
        """Note what one linear communicates beside the moves of activations."""

    def after_backward(self, step: int) -> None:
        """Note what is communicated for gradients at the end of a step."""

    def computes_as(self, told: Passage, once: Pass) -> Linear:  # noqa: ARG002 - for those whose parts must not be empty
        """How a linear computes."""
        if told.is_by_rows:
            return BY_ROWS
        return {Split.COLUMN: COLUMN, Split.ROW: ROW}.get(told.split, WHOLE)

    def _model(self, step: int, rows: int) -> None:
        self._embedding(step, rows)
        for index in range(len(self.plan)):
            self._layer(step, index, rows)
        self._head(step, rows)

    def _embedding(self, step: int, rows: int) -> None:
        model, split = self.view.training.model, self.parallelism.source
        if model.source is None or self.length is None or split is Split.OUTSIDE:
            return
        once = Pass(
            step=step,
            rows=rows,
            inputs=model.source.vocabulary,
            width=model.features,
            bias=False,
            trains_weight=not model.source.frozen or self.view.differentiates_frozen(None),
            trains_bias=False,
            differentiates=False,
            recomputed=False,
            completed=False,
        )
        made = {Split.ROW: ROW.made, Split.COLUMN: COLUMN.made}.get(split, ActivationPlacement.WHOLE)
        self._outputs(once, made, OF_SHARDING[self.inputs[0]])
        if model.source.learned_positions:
            self._outputs(replace(once, rows=self.length), ActivationPlacement.WHOLE, OF_SHARDING[self.inputs[0]])

    def _head(self, step: int, rows: int) -> None:
        model, last = self.view.training.model, len(self.plan)
        if model.head is None or self.parallelism.head is Split.OUTSIDE:
            return
        once = Pass(
            step=step,
            rows=rows,
            inputs=model.inputs(last),
            width=model.outputs,
            bias=model.head.bias,
            trains_weight=not (model.head.tied and model.source is not None and model.source.frozen)
            or self.view.differentiates_frozen(None),
            trains_bias=model.head.bias,
            differentiates=model.head.norm is not None or differentiates_input(self.view, last, step),
            recomputed=False,
            completed=False,
        )
        self._linear(once, head_passage(model, self.parallelism))

    def _layer(self, step: int, index: int, rows: int) -> None:
        if self.plan[index].split is Split.OUTSIDE:
            return
        model, plan = self.view.training.model, self.plan[index]
        layer, inputs, outputs = model.layers[index], model.inputs(index), model.inputs(index + 1)
        shapes = {parameter.name: parameter.shape for parameter in kind_of(layer).parameters(layer, inputs)}
        trained, trains_shared = (self._trains(owner) for owner in (index, index if layer.shares is None else layer.shares))
        differentiates = differentiates_input(self.view, index, step) or (layer.norm is not None and trained)
        parts = [part for part in kind_of(layer).parts(layer) if runs(part.runs, step)]
        keeps = differentiates or trains_shared or (trained and _keeps_for_its_own(layer, parts, shapes))
        recomputed = self.view.layout.execution.checkpoints(index) and keeps
        once = Pass(
            step=step,
            rows=rows,
            inputs=inputs,
            width=outputs,
            bias=False,
            trains_weight=trained,
            trains_bias=False,
            differentiates=differentiates,
            recomputed=recomputed,
            completed=recomputed and layer.dropout > 0,
        )
        weights = weights_of_addends(layer, plan.split)
        if weights is not None:
            self._region(once, weights, OF_SHARDING[self.inputs[index]], OF_SHARDING[plan.output])
            return
        for part in parts:
            # The weight of a layer that shares it is as large as its own would be.
            width, features = shapes.get(f"{part.name}.weight", (outputs, inputs))
            has_bias = f"{part.name}.bias" in shapes
            of_part = replace(
                once,
                inputs=features,
                width=width,
                bias=has_bias,
                trains_weight=trained if f"{part.name}.weight" in shapes else trains_shared,
                trains_bias=trained and has_bias,
                differentiates=differentiates or (trained and not part.reads_input),
                completed=recomputed and (part is not parts[-1] or part.activated or layer.dropout > 0),
            )
            self._linear(of_part, passage(model, part, plan, self.inputs[index]))

    def _trains(self, index: int) -> bool:
        """Whether gradients of a layer's own parameters are computed."""
        return not self.view.training.model.layers[index].frozen or self.view.differentiates_frozen(index)

    def _region(self, once: Pass, weights: int, before: ActivationPlacement, after: ActivationPlacement) -> None:
        """Of a layer of whose output each rank computes an addend: gradients of what all have are summed over ranks."""
        whole, pending = ActivationPlacement.WHOLE, ActivationPlacement.PENDING
        self._move(once, before, whole, once.inputs, times=1 + once.recomputed)
        self._move(once, pending, whole, once.inputs, times=int(once.differentiates))
        self._move(once, pending, whole, weights, times=int(once.differentiates or once.trained))
        self._outputs(once, pending, after)

    def _linear(self, once: Pass, told: Passage) -> None:
        linear = self.computes_as(told, once)
        self._activations(once, linear, OF_SHARDING[told.input], OF_SHARDING[told.output])
        self.after_linear(once, told, linear)

    def _activations(self, once: Pass, linear: Linear, before: ActivationPlacement, after: ActivationPlacement) -> None:
        """Input and output where they are wanted, and their gradients back."""
        self._move(once, before, linear.wanted, once.inputs, times=1 + once.recomputed)
        self._outputs(once, linear.made, after)
        if once.differentiates:
            self._move(once, linear.input_gradient, before, once.inputs)

    def _outputs(self, once: Pass, made: ActivationPlacement, after: ActivationPlacement) -> None:
        """Output where it is wanted, and its gradient back."""
        self._move(once, made, after, once.width, times=1 + once.completed)
        if once.differentiates or once.trained:
            self._move(once, after, ActivationPlacement.WHOLE if made is ActivationPlacement.PENDING else made, once.width)

    def _move(self, once: Pass, source: ActivationPlacement, target: ActivationPlacement, features: int, times: int = 1) -> None:
        """From one way to lie to another; where there is no all-to-all, as over gloo, what is to be cut otherwise is gathered."""
        if source is target or source is ActivationPlacement.WHOLE:
            return
        if source is ActivationPlacement.PENDING:
            op, num_elements = self._reduced(once, target, features)
        elif source is ActivationPlacement.ROWS:
            op, num_elements = "all_gather", self._rows_of_part(once) * self.gathered_features(features, target)
        else:
            op, num_elements = "all_gather", once.rows * chunk_size(features, self.parts)
        self.note(once, op, num_elements, times)

    def gathered_features(self, features: int, target: ActivationPlacement) -> int:  # noqa: ARG002 - for those that pad
        """Features of rows that are gathered to lie as `target`."""
        return features

    def note(self, once: Pass, op: str, num_elements: int, times: int = 1) -> None:
        """Note calls of so many elements each; none for no times."""
        if times:
            self.ledger.note(once.step, op, self.axes, num_elements * self.view.item_bytes * times, times)

    def _reduced(self, once: Pass, target: ActivationPlacement, features: int) -> tuple[str, int]:
        """A sum over ranks, and its elements: padded to equal parts where each rank is left one."""
        if target is ActivationPlacement.WHOLE:
            return "all_reduce.sum", once.rows * features
        if target is ActivationPlacement.ROWS:
            return "reduce_scatter.sum", self._rows_of_part(once) * self.parts * features
        return "reduce_scatter.sum", once.rows * chunk_size(features, self.parts) * self.parts

    def _rows_of_part(self, once: Pass) -> int:
        """Rows of the first rank where activations lie by rows; of sequences, whose positions are cut, of all of them."""
        length = once.rows if self.length is None else self.length
        return once.rows // length * chunk_size(length, self.parts) if length else 0


def _keeps_for_its_own(layer: AnyLayer, parts: Sequence[Part], shapes: Container[str]) -> bool:
    """Whether a layer keeps anything for gradients of its own parameters: for one of a bias alone it does not."""
    has_weights = layer.shares is None or any(f"{part.name}.weight" in shapes for part in parts)
    return has_weights or parts[-1].activated or layer.dropout > 0
