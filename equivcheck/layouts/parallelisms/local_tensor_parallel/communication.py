"""Expected calls for tensor parallelism on plain tensors: redistributed activations, and sums of replicated gradients."""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.passes import Passes
from equivcheck.layouts.base.expected_calls.rank_view import Held, RankView
from equivcheck.layouts.base.expected_calls.shared import sharded_clipping
from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.layouts.base.plan.expected_calls import LinearPasses, PlannedCalls, sharded_held
from equivcheck.layouts.base.plan.linears import BY_ROWS, ROW, LinearPlacements, LinearPlan
from equivcheck.scenario import ActivationSharding, Collectives, CrossEntropy, LocalTensorParallel, ParameterOwner, Split
from equivcheck.scenario.mesh import TP


class LocalCalls(PlannedCalls):
    """Predicts the collective calls of tensor parallelism on plain tensors.

    The calls redistribute activations. If ranks apply a replicated parameter to different rows, each backward also sums the
    parameter's gradient over ranks.
    """

    adds_bias_to_sums = True

    def after_linear(self, passes: LinearPasses, plan: LinearPlan, linear: LinearPlacements) -> None:
        """Count the calls in backward for gradients of replicated parameters in a linear.

        If the linear computes sharded rows, weight and bias are replicated. In a row-parallel linear with a sharded output, only
        the bias is replicated.
        """
        if linear is BY_ROWS:
            self.note(passes, "all_reduce.sum", passes.width * passes.inputs, times=passes.trains_weight)
            self.note(passes, "all_reduce.sum", passes.width, times=passes.trains_bias)
        elif linear is ROW and plan.output is ActivationSharding.ROWS:
            self.note(passes, "all_reduce.sum", passes.width, times=passes.trains_bias)
        elif linear is ROW and plan.output is ActivationSharding.FEATURES:
            self.note(passes, "all_gather", chunk_size(passes.width, self.parts), times=passes.trains_bias)

    def loss(self, passes: Passes, rows: int) -> None:
        """Count two calls for each pass.

        One has the maximum logit in each row. The other has the sums over classes in each row, such as the sum of exponentials.
        """
        loss = self.view.training.loss
        assert isinstance(loss, CrossEntropy), "a limit leaves no other"
        if self.parts > 1:
            is_typed = parallelism_of(self.view.layout, LocalTensorParallel).collectives is Collectives.TYPED
            largest = "all_gather" if is_typed else "all_reduce.max"
            num_sums, num_bytes = 3 if loss.label_smoothing else 2, rows * self.view.item_bytes
            self.ledger.note(passes.step, largest, self.axes, num_bytes, passes.times)
            self.ledger.note(passes.step, "all_reduce.sum", self.axes, num_sums * num_bytes, passes.times)

    def after_backward(self, step: int) -> None:
        """Count the calls that sum gradients of norm layers on sharded rows."""
        times = self.view.num_backwards(step)
        for held in self.view.held:
            if held.parameter.is_norm_parameter and self._is_of_own_rows(held) and self._is_differentiated(held, step):
                self.ledger.note(step, "all_reduce.sum", self.axes, held.numel * self.view.item_bytes * times, times)

    def _is_differentiated(self, held: Held, step: int) -> bool:
        return held.parameter.is_used_at(step) and (held.trained or self.view.computes_frozen_gradients(held.layer))

    def _is_of_own_rows(self, held: Held) -> bool:
        if held.parameter.owner is ParameterOwner.HEAD:
            return self.inputs[-1] is ActivationSharding.ROWS
        is_planned = held.layer is not None and self.plan[held.layer].split is not Split.NOT_IN_PLAN
        return is_planned and self.inputs[held.layer or 0] is ActivationSharding.ROWS


def _all_calls(view: RankView, parallelism: LocalTensorParallel) -> Totals:
    cut = (held for held in sharded_held(view, parallelism) if held.cut)
    return LocalCalls(view, parallelism).totals() | sharded_clipping(view, TP, cut)


LOCAL_TENSOR_PARALLEL_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    hold=lambda view, parallelism: tuple(sharded_held(view, parallelism)),
    uneven=lambda _plan: True,
)
