"""Phases of a step that can be compared, because both the single-device run and the ranks have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from equivcheck.user.traces.reported import NOTHING, with_reports_at_all_steps
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.usage import invalid
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Snapshot

NO_LOSS = "losses were not compared: {who} returned none. Gradients, updates and state were compared"
NO_GRADIENTS = (
    "gradients were not compared: no parameter {where} has a gradient in `.grad` when an optimizer steps. Losses, updates and "
    "state were compared"
)
ABOUT_REPORTED = (
    "`{name}` is a value that your step returned: it must be the same on every rank that returns it. Reduce it over ranks if "
    "each rank computes it from its own rows or shards"
)


def phases_left_out(single: UserTrace, traces: Sequence[UserTrace]) -> dict[Phase, str]:
    """Return the phases that cannot be compared because ranks or one device recorded no values: loss, gradient, or both.

    The dict has a note with the reason for each phase.
    """
    found: dict[Phase, str] = {}
    has_loss = [any(step.loss is not None for step in trace.steps) for trace in (single, *traces)]
    if not (has_loss[0] and any(has_loss[1:])):
        found[Phase.LOSS] = NO_LOSS.format(who="no rank" if has_loss[0] else "the step on one device")
    has_gradients = [any(any(step.gradients.present) for step in trace.steps) for trace in (single, *traces)]
    lacking = (single,) if not has_gradients[0] else () if any(has_gradients[1:]) else tuple(traces)
    # Without updates, a backward pass is missing, or everything is frozen.
    if lacking and any(map(_updates, lacking)):
        where = "on one device" if lacking == (single,) else "on your ranks"
        found[Phase.GRADIENT] = NO_GRADIENTS.format(where=where)
    return found


def _updates(trace: UserTrace) -> bool:
    """Return whether any parameter changes after the first step. True for a single step, whose initial values are unknown."""
    values = [step.parameters.values for step in trace.steps]
    return len(values) == 1 or any(not np.array_equal(before, after) for before, after in pairwise(values))


def without_phases(trace: UserTrace, phases: Collection[Phase], *, reports: bool, buffers: bool) -> UserTrace:
    """Return the trace without the losses or gradients in `phases`.

    With `reports`, a step without reported values gets an empty snapshot for them. With `buffers`, a step without buffers gets an
    empty snapshot, too. Without `buffers`, the steps' buffers are dropped, so only the final buffers are compared.
    """
    if reports:
        trace = replace(trace, steps=with_reports_at_all_steps(trace.steps))
    if any((step.buffers is not None) is not buffers for step in trace.steps):
        trace = replace(trace, steps=tuple(replace(step, buffers=NOTHING if buffers else None) for step in trace.steps))
    if not phases:
        return trace
    steps = tuple(
        replace(
            step,
            loss=None if Phase.LOSS in phases else step.loss,
            gradients=_absent(step.gradients) if Phase.GRADIENT in phases else step.gradients,
        )
        for step in trace.steps
    )
    return replace(trace, steps=steps)


def _absent(snapshot: Snapshot) -> Snapshot:
    nothing = (False,) * len(snapshot.pieces)
    return replace(snapshot, present=nothing, fits=nothing, dtypes=("",) * len(nothing), values=np.empty(0))


def require_same_reports(single: UserTrace, traces: Sequence[UserTrace]) -> None:
    """Raise `UsageError` if the user's step returns a value only on one device, or only on ranks."""
    names = [{piece.name for step in each.steps if step.reported for piece in step.reported.pieces} for each in (single, *traces)]
    for name in sorted(names[0] ^ set().union(*names[1:])):
        where = "on one device" if name in names[0] else "on ranks"
        expected = "the same names on one device and on at least one rank"
        raise invalid("the result from `step` or `also`", f"it contains {name!r} only {where}", expected)
