"""Limits for tensor-parallel plans, on DTensors or plain tensors."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, parallelism_of
from equivcheck.layouts.base.limits.repairs import is_tied, with_head, with_num_layers, without_tied_head
from equivcheck.layouts.base.plan.rules import TIED_HALVES, LayerSite, PlanRule, fits, inputs_of, places
from equivcheck.scenario import ActivationSharding, Layout, PlannedParallelism, Training
from equivcheck.scenario.mesh import TP


def _first_broken(rule: PlanRule, training: Training, layout: Layout) -> LayerSite | None:
    tp = parallelism_of(layout, PlannedParallelism)
    if not fits(training.model, tp.plan):
        return None
    rows = layout.rows_of_forwards(training.data.microbatches)
    found = places(training.model, tp, layout.mesh.size(TP), rows)
    return next((place for place, entry in zip(found, tp.plan, strict=True) if rule.broken(place, entry)), None)


def limit_of(rule: PlanRule) -> Limit:
    """Convert a rule about one layer's entry in a tensor-parallel plan to a limit for whole scenarios."""

    def applies(training: Training, layout: Layout) -> bool:
        return _first_broken(rule, training, layout) is not None

    def repair(training: Training, layout: Layout) -> Training:
        place = _first_broken(rule, training, layout)
        return training if place is None else rule.repair(training, layout, place)

    return Limit(reason=rule.reason, applies=applies, repair=repair, upstream=rule.upstream)


ONE_ENTRY_A_LAYER = Limit(
    reason="tensor parallelism: a plan with more or fewer entries than the model has layers is not supported: it needs one entry "
    "for each layer",
    applies=lambda training, layout: not fits(training.model, parallelism_of(layout, PlannedParallelism).plan),
    repair=lambda training, layout: with_num_layers(training, len(parallelism_of(layout, PlannedParallelism).plan)),
)

APPLIED_FIRST = LayoutLimit(
    reason="tensor parallelism: a parallelism before it in Layout.parallelisms is not supported: it must be the innermost, "
    "because it needs modules that no other parallelism has wrapped or sharded",
    applies=lambda layout: not isinstance(layout.parallelisms[0], PlannedParallelism),
    repair=lambda layout: replace(
        layout, parallelisms=tuple(sorted(layout.parallelisms, key=lambda each: not isinstance(each, PlannedParallelism)))
    ),
)


def _unties(training: Training, layout: Layout) -> bool:
    tp = parallelism_of(layout, PlannedParallelism)
    return is_tied(training.model) and TIED_HALVES[tp.source] is not tp.head


ENDS_WHOLE = Limit(
    reason="tensor parallelism: a last plan entry with output ROWS is not supported without a head: the model's output must be "
    "replicated, and only a head gathers the rows",
    applies=lambda training, layout: (
        inputs_of(training.model, parallelism_of(layout, PlannedParallelism))[-1] is ActivationSharding.ROWS
        and training.model.head is None
    ),
    repair=lambda training, _layout: with_head(training),
)

TIES_CUT_ALIKE = Limit(
    reason="tensor parallelism: a head tied to the embedding but sharded along another dim is not supported: both use one "
    "weight, so the head is sharded by outputs if the embedding is sharded by tokens, and by inputs if it is sharded by features",
    applies=_unties,
    repair=lambda training, _layout: without_tied_head(training),
)
