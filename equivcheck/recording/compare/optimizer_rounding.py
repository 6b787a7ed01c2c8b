"""Rounding inside an optimizer: Muon computes its updates in bfloat16, in whatever element type the parameters are.

Moved runs do not measure it, because such small changes seldom lead to another number in bfloat16.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from equivcheck.recording.compare.runs import Key, RecordedRun
from equivcheck.recording.trace import Moment

EPS = torch.finfo(torch.bfloat16).eps
FIRST, LATER = 16.0, 64.0
"""Changes in units of `EPS`, relative to a norm: of the first update, and of later values, which build on it."""


def rounded_inside(run: RecordedRun, key: Key) -> float:
    """Distance that rounding inside an optimizer explains: 0 without Muon, and before its first update."""
    step, moment, name = key
    start = run.first_muon_step
    if start is None or step < start or (step == start and moment is not Moment.UPDATE) or not run.tensors[key].eps:
        return 0.0
    if moment is not Moment.UPDATE:
        return LATER * EPS * run.size(key)
    keys = [(run.steps[0], Moment.START, name), *((number, Moment.UPDATE, name) for number in run.steps if number <= step)]
    values = [value for each in keys if each in run.tensors and (value := run.tensors[each].sketch.value) is not None]
    return (FIRST if step == start else LATER) * EPS * sum(one.distance(other) for one, other in pairwise(values))
