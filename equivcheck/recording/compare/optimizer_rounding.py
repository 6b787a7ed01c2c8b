"""Rounding inside an optimizer: torch's Muon computes its updates in bfloat16, whatever the parameters' element type is.

Moved runs do not measure this rounding, because such small changes seldom lead to another number in bfloat16.
"""

from __future__ import annotations

from itertools import pairwise

from equivcheck.recording.compare.runs import Key, RecordedRun
from equivcheck.recording.trace import Moment

UNDECIDED = 0.125
"""Part of an update, or of a later value's norm. Differences up to this size prove nothing.

bfloat16 has eight bits, and Muon's iterations multiply rounding errors. A wrong learning rate or a missing update changes more.
"""
ABOUT_MUON = "Muon computes updates in bfloat16, so this difference may be rounding"


def may_round_inside(run: RecordedRun, key: Key, distance: float) -> bool:
    """Whether rounding inside torch's Muon may explain a difference between two runs.

    False before Muon's first update, or if the training does not use Muon.
    """
    step, moment, name = key
    start = run.first_muon_step
    if start is None or step < start or (step == start and moment is not Moment.UPDATE):
        return False
    if moment is not Moment.UPDATE:
        return distance <= UNDECIDED * run.size(key)
    keys = [(run.steps[0], Moment.START, name), *((number, Moment.UPDATE, name) for number in run.steps if number <= step)]
    values = [value for each in keys if each in run.tensors and (value := run.tensors[each].sketch.value) is not None]
    return distance <= UNDECIDED * sum(one.distance(other) for one, other in pairwise(values))
