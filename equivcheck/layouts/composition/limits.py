"""Check all limits for a layout, or for two layouts around a checkpoint, and repair to the nearest supported scenario."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import singledispatch
from itertools import chain
from typing import TypeVar

from equivcheck.layouts.base.limits.execution import EXECUTION_LAYOUT_LIMITS, IN_BACKWARD_LIMITS
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, reason_with_versions
from equivcheck.layouts.composition.grouped_limits import GROUPED_LIMITS
from equivcheck.layouts.composition.layer_limits import LAYER_LIMITS
from equivcheck.layouts.composition.registry import BrokenLayout, kind_of
from equivcheck.layouts.composition.resume_limits import CHECKPOINT_LAYOUT_LIMITS, CHECKPOINT_LIMITS, wrong_flattening
from equivcheck.scenario import Layout, Pipeline, Scenario, Training
from equivcheck.scenario.case import Checkable
from equivcheck.system.torch_version import is_torch_in

L = TypeVar("L", Limit, LayoutLimit)

MAX_REPAIRS = 64
"""Maximum number of repairs to a training. If limits still apply, two repairs undo each other, and more would not help."""


@singledispatch
def why_unsupported(case: Checkable, *, beyond: bool = False) -> str | None:  # noqa: ARG001
    """Return the reason why a scenario cannot run, or None if it can. With `beyond`, limits that torch enforces are ignored.

    Tensor programs have no limits: if torch does not support one, it fails when it runs.
    """
    return None


@why_unsupported.register
def _(scenario: Scenario, *, beyond: bool = False) -> str | None:
    layouts, training = scenario.layouts, scenario.training
    reasons = [limit_reason(training, layout, beyond=beyond) for layout in layouts]
    if scenario.resume is not None:
        layout_limits, limits = list(_here(CHECKPOINT_LAYOUT_LIMITS)), list(_here(CHECKPOINT_LIMITS))
        reasons += [reason_with_versions(limit) for layout in layouts for limit in layout_limits if limit.applies(layout)]
        reasons += [reason_with_versions(limit) for layout in layouts for limit in limits if limit.applies(training, layout)]
    return next(filter(None, reasons), wrong_flattening(scenario))


def limit_reason(training: Training, layout: Layout, *, beyond: bool = False) -> str | None:
    """Return the reason why a layout cannot run a training, or None if it can.

    With `beyond`, limits that torch enforces are ignored.
    """
    limit = _first_layout_limit(layout) or _first_limit(training, layout, beyond)
    return None if limit is None else reason_with_versions(limit)


def repair_layout(layout: Layout) -> Layout:
    """Repair a layout until no layout limit applies. Raises `BrokenLayout` if limits still apply after many repairs."""
    for _ in range(MAX_REPAIRS):
        limit = _first_layout_limit(layout)
        if limit is None:
            return layout
        layout = limit.repair(layout)
    raise BrokenLayout(
        f"layout {layout.name}: a limit still applies after {MAX_REPAIRS} repairs: {limit.reason if limit else None}. "
        "Expected limits whose repairs do not undo each other"
    )


def repair_training(training: Training, layout: Layout, *, beyond: bool = False) -> Training:
    """Apply the repairs of all limits that refuse the training, and return a training that the layout can run.

    With `beyond`, trainings that torch itself refuses stay as they are. Raises `BrokenLayout` if a limit still applies after
    `MAX_REPAIRS` repairs.
    """
    for _ in range(MAX_REPAIRS):
        limit = _first_limit(training, layout, beyond)
        if limit is None:
            return training
        training = limit.repair(training, layout)
    raise BrokenLayout(
        f"layout {layout.name}: a limit still applies after {MAX_REPAIRS} repairs: {limit.reason if limit else None}. "
        "Expected limits whose repairs do not undo each other"
    )


def runs_sequences(layout: Layout) -> bool:
    """Whether every parallelism in a layout supports layers other than linear layers, and rows that are sequences."""
    return not any(list(_here(kind_of(parallelism).model_limits)) for parallelism in layout.parallelisms)


def can_resume(layout: Layout) -> bool:
    """Whether checkpoints can be saved and loaded under this layout."""
    return not any(limit.applies(layout) for limit in _here(CHECKPOINT_LAYOUT_LIMITS))


def repair_layout_for_resume(layout: Layout) -> Layout:
    """Repair a layout until a training can save and resume under it.

    Raises `BrokenLayout` if limits still apply after many repairs.
    """
    for _ in range(MAX_REPAIRS):
        layout = repair_layout(layout)
        limit = next((limit for limit in _here(CHECKPOINT_LAYOUT_LIMITS) if limit.applies(layout)), None)
        if limit is None:
            return layout
        layout = limit.repair(layout)
    raise BrokenLayout(f"layout {layout.name}: a limit for checkpoints still applies after {MAX_REPAIRS} repairs")


def repair_training_for_resume(training: Training, *layouts: Layout) -> Training:
    """Repair a training until a checkpoint can be saved under one of the layouts and loaded under the other.

    Raises `BrokenLayout` if limits still apply after many repairs.
    """
    for _ in range(MAX_REPAIRS):
        before = training
        for layout in layouts:
            training = repair_training(training, layout)
            for limit in _here(CHECKPOINT_LIMITS):
                training = limit.repair(training, layout) if limit.applies(training, layout) else training
        if training is before:
            return training
    raise BrokenLayout(
        f"layouts {' and '.join(layout.name for layout in layouts)}: "
        f"a limit for checkpoints still applies after {MAX_REPAIRS} repairs"
    )


def _here(limits: Iterable[L]) -> Iterator[L]:
    """Yield the limits that hold for the installed torch version."""
    return (limit for limit in limits if is_torch_in(limit.torch))


def _first_limit(training: Training, layout: Layout, beyond: bool) -> Limit | None:
    kinds = [kind_of(parallelism) for parallelism in layout.parallelisms]
    limits = _here(
        chain(
            *(kind.model_limits for kind in kinds),
            LAYER_LIMITS,
            GROUPED_LIMITS,
            IN_BACKWARD_LIMITS,
            *(kind.limits for kind in kinds),
        )
    )
    # Beyond a limit, every rank must fail. If another parallelism changes stages, torch refuses on the ranks of one stage only.
    stages = layout.has(Pipeline) and len(layout.parallelisms) > 1
    there = (limit for limit in limits if not (beyond and limit.upstream and not stages))
    return next((limit for limit in there if limit.applies(training, layout)), None)


def _first_layout_limit(layout: Layout) -> LayoutLimit | None:
    own = (limit for parallelism in layout.parallelisms for limit in kind_of(parallelism).layout_limits)
    limits = _here(chain(EXECUTION_LAYOUT_LIMITS, own))
    return next((limit for limit in limits if limit.applies(layout)), None)
