"""What `parallelize_module` communicates: activations and their gradients moved from where they lie to where they are needed.

Layers hand local tensors to each other, so that every move belongs to one linear or norm: of its input, of its output, of the
gradients of both, and of the gradients of parameters that every rank has but of which each sees only some rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from equivcheck.layers.registry import kind_of
from equivcheck.layouts.expected_calls.clipping import dtensor_clipping
from equivcheck.layouts.expected_calls.communication import Totals
from equivcheck.layouts.expected_calls.model import MIXED_ELEMENTS, CommunicationModel, Unmodelled
from equivcheck.layouts.expected_calls.rank_view import Held, Ledger, RankView, runs
from equivcheck.layouts.expected_calls.torch_versions import WEIGHT_GATHERED_FOR_INPUT_GRADIENT
from equivcheck.layouts.partition import chunk_size, cut_dim, part_of
from equivcheck.parallelisms.tensor_parallel.passage import Passage, head_passage, passage
from equivcheck.parallelisms.tensor_parallel.plans import computes_rows_apart, has_pending_gradients, inputs_of, is_outside
from equivcheck.scenario import (
    FSDP1,
    FSDP2,
    ActivationSharding,
    CrossEntropy,
    Layout,
    Owner,
    Replicate,
    Replicator,
    Split,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.mesh import TP
from equivcheck.torch_version import torch_in


class ActivationPlacement(Enum):
    """How an activation lies over the ranks, as `ActivationSharding` has it; PENDING is whole, but yet to be summed."""

    WHOLE = "whole"
    ROWS = "rows"
    FEATURES = "features"
    PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """How one linear computes, or an embedding, which has no input that could be moved."""

    wanted: ActivationPlacement
    """How it needs its input."""
    made: ActivationPlacement
    """How its output comes out."""
    input_gradient: ActivationPlacement
    """How the gradient of the input comes out."""


_OF_SHARDING = {
    ActivationSharding.WHOLE: ActivationPlacement.WHOLE,
    ActivationSharding.ROWS: ActivationPlacement.ROWS,
    ActivationSharding.FEATURES: ActivationPlacement.FEATURES,
}
_COLUMN = Linear(wanted=ActivationPlacement.WHOLE, made=ActivationPlacement.FEATURES, input_gradient=ActivationPlacement.PENDING)
_ROW = Linear(wanted=ActivationPlacement.FEATURES, made=ActivationPlacement.PENDING, input_gradient=ActivationPlacement.FEATURES)
_NARROW_COLUMN = Linear(
    wanted=ActivationPlacement.WHOLE, made=ActivationPlacement.WHOLE, input_gradient=ActivationPlacement.WHOLE
)
_NARROW_ROW = Linear(
    wanted=ActivationPlacement.FEATURES, made=ActivationPlacement.WHOLE, input_gradient=ActivationPlacement.WHOLE
)
_WHOLE = Linear(wanted=ActivationPlacement.WHOLE, made=ActivationPlacement.WHOLE, input_gradient=ActivationPlacement.WHOLE)
_BY_ROWS = Linear(wanted=ActivationPlacement.ROWS, made=ActivationPlacement.ROWS, input_gradient=ActivationPlacement.ROWS)


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
    trained: bool
    """Whether its parameters require gradients."""
    differentiates: bool
    """Whether its input does."""
    recomputed: bool
    """Whether backward asks for its input again."""
    completed: bool
    """Whether it then also computes: it does if something is kept for backward after it."""


class TensorParallelCalls:
    """Goes through a training, step by step."""

    def __init__(self, view: RankView, parallelism: TensorParallel) -> None:
        self.view, self.plan = view, parallelism.plan
        self.parts = view.layout.mesh.size(TP)
        self.axes = view.axes(TP)
        self.parallelism, self.inputs = parallelism, inputs_of(view.training.model, parallelism)
        self.ledger = Ledger()

    def totals(self) -> Totals:
        """The calls of all steps."""
        training = self.view.training
        for step in range(training.steps):
            for microbatch in training.data.microbatches:
                rows = microbatch // self.view.layout.num_data_ranks * (training.model.length or 1)
                if self.parts > 1:
                    self._model(step, rows)
                if self.parallelism.loss_parallel:
                    self._loss(step, rows)
            if self.parts > 1:
                self._gradients(step)
        return self.ledger.totals

    def _model(self, step: int, rows: int) -> None:
        self._embedding(step, rows)
        for index in range(len(self.plan)):
            self._layer(step, index, rows)
        self._head(step, rows)

    def _embedding(self, step: int, rows: int) -> None:
        model, split = self.view.training.model, self.parallelism.source
        if model.source is None or model.length is None or split is Split.OUTSIDE:
            return
        once = Pass(
            step=step,
            rows=rows,
            inputs=model.source.vocabulary,
            width=model.features,
            bias=False,
            trained=not model.source.frozen,
            differentiates=False,
            recomputed=False,
            completed=False,
        )
        made = {Split.ROW: _ROW.made, Split.COLUMN: _COLUMN.made}.get(split, ActivationPlacement.WHOLE)
        self._outputs(once, made, _OF_SHARDING[self.inputs[0]])
        if model.source.learned_positions:
            self._outputs(replace(once, rows=model.length), ActivationPlacement.WHOLE, _OF_SHARDING[self.inputs[0]])

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
            trained=not (model.head.tied and model.source is not None and model.source.frozen),
            differentiates=model.head.norm is not None or differentiates_input(self.view, last, step),
            recomputed=False,
            completed=False,
        )
        self._linear(once, head_passage(model, self.parallelism))

    def _loss(self, step: int, rows: int) -> None:
        """Of each row's logits the maximum, the sum of exponentials and that of the label, even on one rank.

        A z-loss gathers the logits, as DTensor takes the `logsumexp` of whole rows.
        """
        for op in ("all_reduce.max", "all_reduce.sum", "all_reduce.sum"):
            self.ledger.note(step, op, self.axes, rows * self.view.item_bytes)
        training = self.view.training
        if isinstance(training.loss, CrossEntropy) and training.loss.z_loss and self.parts > 1:
            part = rows * chunk_size(training.model.outputs, self.parts)
            self.ledger.note(step, "all_gather", self.axes, part * self.view.item_bytes)

    def _layer(self, step: int, index: int, rows: int) -> None:
        if self.plan[index].split is Split.OUTSIDE:
            return
        model, plan = self.view.training.model, self.plan[index]
        layer, inputs, outputs = model.layers[index], model.inputs(index), model.inputs(index + 1)
        shapes = {parameter.name: parameter.shape for parameter in kind_of(layer).parameters(layer, inputs)}
        differentiates = differentiates_input(self.view, index, step) or (layer.norm is not None and not layer.frozen)
        recomputed = self.view.layout.execution.checkpoints(index) and (differentiates or not layer.frozen)
        parts = [part for part in kind_of(layer).parts(layer) if runs(part.runs, step)]
        for part in parts:
            # The weight of a layer that shares it is as large as its own would be.
            width, features = shapes.get(f"{part.name}.weight", (outputs, inputs))
            once = Pass(
                step=step,
                rows=rows,
                inputs=features,
                width=width,
                bias=f"{part.name}.bias" in shapes,
                trained=not layer.frozen,
                differentiates=differentiates or not (part.reads_input or layer.frozen),
                recomputed=recomputed,
                completed=recomputed and (part is not parts[-1] or part.activated or layer.dropout > 0),
            )
            self._linear(once, passage(model, part, plan, self.inputs[index]))

    def _linear(self, once: Pass, told: Passage) -> None:
        linear = self._linear_of(told, once.inputs, once.width)
        self._activations(once, linear, _OF_SHARDING[told.input], _OF_SHARDING[told.output])
        self._narrow(once, linear)

    def _linear_of(self, told: Passage, inputs: int, width: int) -> Linear:
        if told.split is Split.COLUMN:
            return _COLUMN if width >= self.parts else _NARROW_COLUMN
        if told.split is Split.ROW:
            return _ROW if inputs >= self.parts else _NARROW_ROW
        return _BY_ROWS if told.is_by_rows else _WHOLE

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
        """From one way to lie to another; where there is no all-to-all, as over gloo, DTensor gathers what it then cuts."""
        if source is target or source is ActivationPlacement.WHOLE:
            return
        if source is ActivationPlacement.PENDING:
            op, num_elements = (
                "all_reduce.sum" if target is ActivationPlacement.WHOLE else "reduce_scatter.sum",
                once.rows * features,
            )
        elif source is ActivationPlacement.ROWS:
            padded = chunk_size(features, self.parts) * self.parts if target is ActivationPlacement.FEATURES else features
            op, num_elements = "all_gather", once.rows // self.parts * padded
        else:
            op, num_elements = "all_gather", once.rows * chunk_size(features, self.parts)
        self.ledger.note(once.step, op, self.axes, num_elements * self.view.item_bytes * times, times)

    def _narrow(self, once: Pass, linear: Linear) -> None:
        """What DTensor gathers of a linear with fewer features than ranks, which it will not compute in parts."""
        again = once.differentiates and torch_in(WEIGHT_GATHERED_FOR_INPUT_GRADIENT)
        if linear is _NARROW_COLUMN:
            self._gather(once, chunk_size(once.width, self.parts) * once.inputs, times=1 + once.completed + again)
            self._gather(once, chunk_size(once.width, self.parts), times=once.bias * (1 + once.completed))
        elif linear is _NARROW_ROW:
            self._gather(once, chunk_size(once.inputs, self.parts) * once.width, times=1 + once.completed + again)
            self._gather(once, chunk_size(once.inputs, self.parts) * once.rows, times=1 + once.completed + once.trained)

    def _gather(self, once: Pass, num_elements: int, times: int) -> None:
        if times:
            self.ledger.note(once.step, "all_gather", self.axes, num_elements * self.view.item_bytes * times, times)

    def _gradients(self, step: int) -> None:
        """Gradients of parameters that every rank has whole, of which each rank has seen some rows: summed when they are kept."""
        times = 1 if holds_back(self.view.layout) else len(self.view.training.data.microbatches)
        for held in self.view.held:
            if self._sees_own_rows(held) and self.view.has_gradient(held, step):
                num_bytes = held.numel * self.view.item_bytes * times
                self.ledger.note(step, "all_reduce.sum", self.axes, num_bytes, times)

    def _sees_own_rows(self, held: Held) -> bool:
        owner, model = held.parameter.owner, self.view.training.model
        if owner is Owner.HEAD:
            return held.parameter.is_of_norm and self.inputs[-1] is ActivationSharding.ROWS
        if held.layer is None or self.inputs[held.layer] is not ActivationSharding.ROWS:
            return False
        by_rows = self.plan[held.layer].split is Split.REPLICATED and computes_rows_apart(model)
        return held.parameter.is_of_norm or by_rows


def holds_back(layout: Layout) -> bool:
    """Whether a parallelism around this one takes up gradients at the last microbatch alone, as they are."""
    for one in layout.parallelisms:
        if isinstance(one, FSDP2) or (isinstance(one, Replicate) and one.implementation is Replicator.FSDP):
            return one.no_sync
    return False


def differentiates_input(view: RankView, index: int, step: int) -> bool:
    """Whether the input of a layer requires a gradient in a step.

    Of an FSDP1 around the whole model each parameter is a view of the flat one, and a gradient goes through frozen ones as well.
    """
    flat = any(fsdp.use_orig_params and fsdp.wrapping is Wrapping.WHOLE for fsdp in view.layout.of(FSDP1))
    return (flat and index > 0) or view.differentiates(index - 1, step)


def _cut_held(view: RankView, parallelism: TensorParallel) -> Iterator[Held]:
    """What the rank holds of each parameter once the plan has cut it."""
    parts, index = view.layout.mesh.size(TP), view.index(TP)
    for held in view.held:
        dim = cut_dim(parallelism, held.parameter)
        yield held if dim is None else replace(held, shape=part_of(held.shape, dim, parts, index), cut=True)


def _all_calls(view: RankView, parallelism: TensorParallel) -> Totals:
    kind = [held for held in _cut_held(view, parallelism) if not is_outside(parallelism, held.parameter)]
    is_cut = any(held.cut and held.trained and not _has_whole_gradient(view, parallelism, held) for held in kind)
    return TensorParallelCalls(view, parallelism).totals() | dtensor_clipping(view, (TP,) if is_cut else (), kind)


def _has_whole_gradient(view: RankView, parallelism: TensorParallel, held: Held) -> bool:
    """Whether each rank has the whole gradient of what is cut: DTensor leaves that of an untied embedding by tokens so."""
    head = view.training.model.head
    is_by_tokens = held.parameter.owner is Owner.SOURCE and parallelism.source is Split.ROW
    return is_by_tokens and not parallelism.redistribute_gradients and not (head is not None and head.tied)


PENDING_GRADIENTS = Unmodelled(
    reason="tensor parallelism: gradients that are left pending a sum are reduced wherever an operation on them asks for it",
    applies=lambda training, layout: any(
        not parallelism.redistribute_gradients and has_pending_gradients(training.model, parallelism)
        for parallelism in layout.of(TensorParallel)
    ),
)

TENSOR_PARALLEL_COMMUNICATION = CommunicationModel(
    options=frozenset(("plan", "source", "source_output", "head", "loss_parallel", "redistribute_gradients")),
    calls=_all_calls,
    hold=lambda view, parallelism: tuple(_cut_held(view, parallelism)),
    unmodelled=(MIXED_ELEMENTS, PENDING_GRADIENTS),
    uneven=lambda _plan: True,
)
