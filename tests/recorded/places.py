"""Compares the first difference of a recording with that of a full comparison."""

from __future__ import annotations

from equivcheck import TraceVerdict
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Phase

MOMENTS = {
    Phase.LOSS: Moment.LOSS,
    Phase.GRADIENT: Moment.GRADIENT,
    Phase.CLIPPING: Moment.GRADIENT,
    Phase.UPDATE: Moment.UPDATE,
    Phase.REPORTED: Moment.UPDATE,
    Phase.STATE: Moment.STATE,
    Phase.BUFFER: Moment.BUFFER,
}
"""The moment in a recording for each phase of a full comparison. Gradients may be recorded before clipping, too."""
ORDER = list(Moment)


def later_than(verdict: TraceVerdict, step: int, phase: Phase, tensor: str) -> str:
    """Error if a recording's first difference is later than that of a full comparison, or another tensor; empty if not."""
    first, moment = verdict.first, MOMENTS[phase]
    assert first is not None
    if phase is Phase.LOSS and any("the loss of " in note for note in verdict.notes):
        moment = Moment.GRADIENT  # a loss that a factor explains is a note, because a scaler may be on purpose
    places = [(at, ORDER.index(when)) for at, when in ((first.step, first.moment), (step, moment))]
    is_same = first.step == step and first.moment is moment and phase in (Phase.GRADIENT, Phase.UPDATE, Phase.STATE)
    if places[0] > places[1] or (is_same and first.tensor != tensor):
        return f"{first}, but all values show step {step} {phase} {tensor}"
    return ""
