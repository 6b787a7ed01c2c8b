"""Expected calls for `parallelize_module`: redistributions for activations and their gradients.

Layers pass local tensors to each other, so every redistribution belongs to one linear or norm. Replicated parameters' gradients
are summed if each rank has seen only some rows.
"""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import OPTIMIZER_NOT_ELEMENTWISE, CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.passes import Passes
from equivcheck.layouts.base.expected_calls.rank_view import Held, RankView
from equivcheck.layouts.base.expected_calls.shared import dtensor_clipping
from equivcheck.layouts.base.expected_calls.torch_versions import WEIGHT_GATHERED_FOR_INPUT_GRADIENT
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.layouts.base.plan.expected_calls import LinearPasses, PlannedCalls, sharded_held
from equivcheck.layouts.base.plan.linears import NARROW_COLUMN, NARROW_ROW, ActivationPlacement, LinearPlacements, LinearPlan
from equivcheck.layouts.base.plan.rules import computes_own_rows, has_partial_gradients, is_outside
from equivcheck.layouts.parallelisms.pipeline.communication import num_fsdp_reductions
from equivcheck.scenario import (
    FSDP2,
    ActivationSharding,
    Checkpointing,
    CrossEntropy,
    ParameterOwner,
    Replicate,
    Replicator,
    Split,
    TensorParallel,
)
from equivcheck.scenario.mesh import TP
from equivcheck.system.torch_version import is_torch_in


class TensorParallelCalls(PlannedCalls):
    """Predicts the collective calls of DTensor under a tensor-parallel plan.

    If a linear has fewer features to split than ranks, DTensor gathers its shards before it computes. At the end of the backward
    pass, it sums the gradients of replicated parameters.
    """

    def computes_as(self, plan: LinearPlan, passes: LinearPasses) -> LinearPlacements:
        """Return the placements of a linear's input, output and input gradient.

        If the linear has fewer split features than ranks, they are `NARROW_COLUMN` or `NARROW_ROW`.
        """
        if plan.split is Split.COLWISE and passes.width < self.parts:
            return NARROW_COLUMN
        if plan.split is Split.ROWWISE and passes.inputs < self.parts:
            return NARROW_ROW
        return super().computes_as(plan, passes)

    def gathered_features(self, features: int, target: ActivationPlacement) -> int:
        """Return how many features each row has after ranks gather activations that are sharded by rows.

        `target` is the placement after the gather. If it shards features, the number is padded to a multiple of the number of
        ranks.
        """
        return chunk_size(features, self.parts) * self.parts if target is ActivationPlacement.FEATURES else features

    def after_linear(self, passes: LinearPasses, plan: LinearPlan, linear: LinearPlacements) -> None:  # noqa: ARG002 - of the base class
        """Count all-gathers of weight, bias and input for a linear with fewer features than ranks.

        Selective checkpointing keeps the linear's output, so recomputation gathers neither its bias nor its input again.
        """
        if self.view.layout.execution.checkpointing is Checkpointing.SELECTIVE:
            passes = replace(passes, completed=False)
        again = passes.completed + passes.differentiates if is_torch_in(WEIGHT_GATHERED_FOR_INPUT_GRADIENT) else passes.recomputed
        if linear is NARROW_COLUMN:
            self.note(passes, "all_gather", chunk_size(passes.width, self.parts) * passes.inputs, times=1 + again)
            self.note(passes, "all_gather", chunk_size(passes.width, self.parts), times=passes.bias * (1 + passes.completed))
        elif linear is NARROW_ROW:
            inputs = chunk_size(passes.inputs, self.parts)
            self.note(passes, "all_gather", inputs * passes.width, times=1 + again)
            self.note(passes, "all_gather", inputs * passes.rows, times=1 + passes.completed + passes.trained)

    def loss(self, passes: Passes, rows: int) -> None:
        """Count the reductions of each row's maximum logit, sum of exponentials and label logit. They also run on one rank.

        A z-loss also gathers the logits, because DTensor computes `logsumexp` on full rows.
        """
        for op in ("all_reduce.max", "all_reduce.sum", "all_reduce.sum"):
            self.ledger.note(passes.step, op, self.axes, rows * self.view.item_bytes, passes.times)
        training = self.view.training
        if isinstance(training.loss, CrossEntropy) and training.loss.z_loss and self.parts > 1:
            part = rows * chunk_size(training.model.out_features, self.parts)
            self.ledger.note(passes.step, "all_gather", self.axes, part * self.view.item_bytes, passes.times)

    def after_backward(self, step: int) -> None:
        """Count the calls that sum gradients of replicated parameters, if each rank used only some of the rows.

        Each backward has such calls, unless an outer parallelism keeps partial gradients until it reduces them.
        """
        times = num_outer_reductions(self.view, step) or self.view.num_backwards(step)
        for held in self.view.held:
            if self._sees_own_rows(held) and self.view.has_gradient(held, step):
                num_bytes = held.numel * self.view.item_bytes * times
                self.ledger.note(step, "all_reduce.sum", self.axes, num_bytes, times)

    def _sees_own_rows(self, held: Held) -> bool:
        owner, model = held.parameter.owner, self.view.training.model
        if owner is ParameterOwner.HEAD:
            return held.parameter.is_norm_parameter and self.inputs[-1] is ActivationSharding.ROWS
        if held.layer is None or self.inputs[held.layer] is not ActivationSharding.ROWS:
            return False
        by_rows = self.plan[held.layer].split is Split.REPLICATED and computes_own_rows(model)
        return held.parameter.is_norm_parameter or by_rows


def num_outer_reductions(view: RankView, step: int) -> int:
    """Return how often an outer `fully_shard` or `replicate_with_fsdp` reduces gradients in a step. 0 without one."""
    for one in view.layout.parallelisms:
        if isinstance(one, FSDP2) or (isinstance(one, Replicate) and one.implementation is Replicator.FSDP):
            return num_fsdp_reductions(view, step, no_sync=one.no_sync)
    return 0


def _all_calls(view: RankView, parallelism: TensorParallel) -> Totals:
    kind = [held for held in sharded_held(view, parallelism) if not is_outside(parallelism, held.parameter)]
    trained = [held for held in kind if held.trained and held.counts_in_norm]
    is_cut = any(held.cut and not _has_whole_gradient(view, parallelism, held) for held in trained)
    return TensorParallelCalls(view, parallelism).totals() | dtensor_clipping(view, (TP,) if is_cut else (), kind)


def _has_whole_gradient(view: RankView, parallelism: TensorParallel, held: Held) -> bool:
    """Whether each rank has a sharded parameter's full gradient, as DTensor keeps it for an untied embedding split by tokens."""
    head = view.training.model.head
    is_by_tokens = held.parameter.owner is ParameterOwner.SOURCE and parallelism.source is Split.ROWWISE
    return is_by_tokens and not parallelism.redistribute_gradients and not (head is not None and head.tied)


PENDING_GRADIENTS = Unpredicted(
    reason="TensorParallel(redistribute_gradients=False): reductions of partial gradients are not predicted: any operation on "
    "them may ask for one",
    applies=lambda training, layout: any(
        not parallelism.redistribute_gradients and has_partial_gradients(training.model, parallelism)
        for parallelism in layout.of(TensorParallel)
    ),
)

TENSOR_PARALLEL_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    hold=lambda view, parallelism: tuple(sharded_held(view, parallelism)),
    unmodelled=(OPTIMIZER_NOT_ELEMENTWISE, PENDING_GRADIENTS),
    uneven=lambda _plan: True,
)
