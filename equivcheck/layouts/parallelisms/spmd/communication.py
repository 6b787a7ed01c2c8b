"""Expected calls for DTensor propagation with replicated parameters: one sum for each gradient.

A linear loss has the same gradient for all rows. In backward, this gradient stays replicated until an operation needs an
activation sharded by rows, so the last layers' biases get their gradients without communication.
"""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import OPTIMIZER_NOT_ELEMENTWISE, CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.scenario import SPMD, Activation, CrossEntropy, Distribution, Layout, Training
from equivcheck.system.torch_version import is_torch_in


def replicated_totals(view: RankView, spmd: SPMD) -> Totals:
    """Return the expected collective calls in all steps for SPMD with replicated parameters."""
    ledger, names = Ledger(), view.layout.axes_of(spmd)
    for step in range(view.training.steps if view.layout.mesh.size(*names) > 1 else 0):
        num_microbatches = len(view.training.microbatches_at(step))
        for held in view.held:
            if view.has_gradient(held, step) and not _is_whole(view, held):
                num_bytes = held.numel * view.item_bytes * num_microbatches
                ledger.note(step, "all_reduce.sum", view.axes(*names), num_bytes, num_microbatches)
        if _reduces_number_of_labels(view.training):
            ledger.note(step, "all_reduce.sum", view.axes(*names), view.item_bytes * num_microbatches, num_microbatches)
    return ledger.totals


def _reduces_number_of_labels(training: Training) -> bool:
    """Whether the backward of a cross-entropy, summed over labels, reduces their number, which it does not use."""
    # Torch 2.12 and later leave the number partial. Limits refuse cross-entropies with torch before 2.11.
    return is_torch_in("<2.12") and isinstance(training.loss, CrossEntropy) and not training.loss.weighs_labels


def _is_whole(view: RankView, held: Held) -> bool:
    """Whether a gradient is replicated without communication."""
    if held.name != "linear.bias" or not view.training.loss.is_linear:
        return False
    layers = view.training.model.linears[held.layer :]
    return all(
        layer.activation is Activation.IDENTITY and not layer.dropout and (layer.norm is None or number == 0)
        for number, layer in enumerate(layers)
    )


def _is_sharded(_training: Training, layout: Layout) -> bool:
    return any(spmd.distribution is Distribution.FULLY_SHARD for spmd in layout.of(SPMD))


LEFT_TO_PROPAGATION = Unpredicted(
    reason="SPMD: gathers of sharded parameters are not predicted: DTensor's propagation chooses them for each operation, by "
    "sizes",
    applies=_is_sharded,
)

PENDING_GRADIENTS = Unpredicted(
    reason="SPMD: reductions of partial gradients are not predicted: any operation on them may ask for one",
    applies=lambda _training, layout: any(not spmd.redistribute_gradients for spmd in layout.of(SPMD)),
)

UNKNOWN_BIASES = Unpredicted(
    reason="SPMD: reductions of the gradients of a linear loss are not predicted: only models of linear "
    "layers on single rows have known gradient placements",
    applies=lambda training, _layout: training.loss.is_linear and training.model.length is not None,
)

ROWS_BEHIND_POSITIONS = Unpredicted(
    reason="SPMD: gathers for views that flatten rows along dim 1 with positions are not predicted: propagation decides them",
    applies=lambda training, _layout: training.data.batch_dim != 0 and training.model.length is not None,
)

COUNTED_UNITS = Unpredicted(
    reason="SPMD: reductions of expert counts are not predicted: the counts are partial over ranks, and any operation on them "
    "may ask for one",
    applies=lambda training, _layout: training.model.balances or training.model.has_router_bias,
)

SPMD_COMMUNICATION = CommunicationModel(
    calls=replicated_totals,
    unmodelled=(
        LEFT_TO_PROPAGATION,
        PENDING_GRADIENTS,
        OPTIMIZER_NOT_ELEMENTWISE,
        UNKNOWN_BIASES,
        ROWS_BEHIND_POSITIONS,
        COUNTED_UNITS,
    ),
)
