"""Limits for `loss_parallel`."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.repairs import with_equal_rows, with_head, with_labels, with_loss, with_tokens, without_scale
from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.scenario import Compile, CrossEntropy, Layout, Normaliser, PlannedParallelism, Training
from equivcheck.scenario.mesh import TP


def _where(broken: Callable[[Training, Layout], bool]) -> Callable[[Training, Layout], bool]:
    """Restrict a condition to layouts with `loss_parallel`."""
    return lambda training, layout: parallelism_of(layout, PlannedParallelism).loss_parallel and broken(training, layout)


ENDS_IN_HEAD = Limit(
    reason="loss_parallel: a model without a head is not supported: it has no logits to shard",
    applies=_where(lambda training, _layout: training.model.head is None),
    repair=lambda training, _layout: with_head(training),
)

CROSS_ENTROPY_ALONE = Limit(
    reason="loss_parallel: a loss other than the cross-entropy of labels is not supported: loss_parallel computes cross-entropy "
    "only",
    applies=_where(lambda training, _layout: not isinstance(training.loss, CrossEntropy)),
    repair=lambda training, _layout: with_labels(training),
)


def _compiles_for_any_rows(training: Training, layout: Layout) -> bool:
    execution, rows = layout.execution, set(training.data.microbatches)
    as_one = execution.compile is not Compile.NONE and not execution.per_layer
    return as_one and execution.compiled_autograd and len(rows) > 1


LOSS_PARALLEL: tuple[Limit, ...] = (
    ENDS_IN_HEAD,
    CROSS_ENTROPY_ALONE,
    Limit(
        reason="loss_parallel: a rank without classes is not supported: it skips the all-reduce of the maximum, so the other "
        "ranks wait, and it cannot look up a label ('index 0 is out of bounds for dimension 1 with size 0')",
        applies=_where(
            lambda training, layout: (
                training.model.head is not None and is_last_shard_empty(training.model.out_features, layout.mesh.size(TP))
            )
        ),
        repair=lambda training, layout: with_tokens(training, layout.mesh.size(TP)),
    ),
    UpstreamLimit(
        reason="loss_parallel: label_smoothing is not supported: DTensor refuses to mask the partial sum over classes in place, "
        "and torch documents this limit",
        applies=_where(lambda training, _layout: isinstance(training.loss, CrossEntropy) and training.loss.label_smoothing > 0),
        repair=lambda training, _layout: with_loss(training, label_smoothing=0.0),
        torch="!=2.10.*",  # 2.10 masks it, with a wrong gradient (pytorch#190746)
    ),
    UpstreamLimit(
        reason="loss_parallel: a z-loss is not supported: it is the square of logsumexp, for which DTensor has no rule",
        applies=_where(lambda training, _layout: isinstance(training.loss, CrossEntropy) and training.loss.z_loss > 0),
        repair=lambda training, _layout: with_loss(training, z_loss=0.0),
        torch="<2.10",
    ),
    UpstreamLimit(
        reason="loss_parallel: weights of labels are not supported: selecting the labels from a DTensor changes its "
        "own shape, so the weights next to them cannot be selected",
        applies=_where(lambda training, _layout: isinstance(training.loss, CrossEntropy) and training.loss.weighs_labels),
        repair=lambda training, _layout: with_loss(training, per=Normaliser.TOKEN, row_weights=False),
        torch="<2.10",
    ),
    Limit(
        reason="loss_parallel: a scalar scale of the logits is not supported: the scale is a plain parameter, but its gradient "
        "is a partial DTensor, which optimizers do not accept",
        applies=_where(lambda training, _layout: training.model.scale),
        repair=lambda training, _layout: without_scale(training),
    ),
    UpstreamLimit(
        reason="loss_parallel: unequal microbatches with compiled autograd and a model compiled as a whole are not supported: "
        "the number of rows is symbolic, and backward cannot be traced through logits of a symbolic size ('SymInt ... is not "
        "tracked with proxy')",
        applies=_where(_compiles_for_any_rows),
        repair=lambda training, _layout: with_equal_rows(training),
    ),
)
