"""Say how initial parameters differ between two runs."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment

_MAX_NAMES = 3
"""Maximum parameters listed with another name."""


def other_start(wrong: Sequence[TensorDifference], first: RecordedRun, second: RecordedRun) -> str:
    """Return a clause about initial parameters in run B that run A has under other names or at other positions.

    Empty if there are none.
    """
    step = wrong[0].step
    own = {
        (tensor.exact.in_place, tensor.shapes): name
        for name, tensor in first.tensors_at(step, Moment.START).items()
        if tensor.exact is not None
    }
    renamed, moved = [], []
    for each in wrong:
        one, other = (run.tensors.get((step, Moment.START, each.tensor)) for run in (first, second))
        exact = None if other is None else other.exact
        if other is None or exact is None:
            continue
        name = own.get((exact.in_place, other.shapes))
        if name is not None and name != each.tensor:
            renamed.append(f"B has A's {name} as {each.tensor}")
        elif one is not None and one.exact is not None and one.exact.anywhere == exact.anywhere and one.shapes == other.shapes:
            moved.append(f"B has {each.tensor} with the same numbers in other places")
    clauses = [*renamed, *moved]
    left = len(clauses) - _MAX_NAMES
    return "; ".join([*clauses[:_MAX_NAMES], *([f"and {left} more"] if left > 0 else [])])


def num_rounded(first: RecordedRun, second: RecordedRun, wrong: Sequence[str]) -> int:
    """Return how many initial parameters differ by rounding only. Parameters with names in `wrong` are left out."""
    pairs = [
        (tensor.exact, second.tensors[key].exact)
        for key, tensor in first.tensors.items()
        if key[1] is Moment.START and key in second.tensors and key[2] not in wrong
    ]
    return sum(one is not None and other is not None and one != other for one, other in pairs)
