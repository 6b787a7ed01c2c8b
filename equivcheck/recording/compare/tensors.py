"""Compare parameters, gradients, optimizer state and buffers, whatever the layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from equivcheck.diagnosis.words import name_ranks
from equivcheck.recording.adapters.precision import rounding_of
from equivcheck.recording.assemble import Cover
from equivcheck.recording.compare.optimizer_rounding import ABOUT_MUON, may_round_inside
from equivcheck.recording.compare.runs import Key, RecordedRun, RecordedTensor
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference

FLOOR = 64.0
"""Machine epsilons, relative to a tensor's norm, by which rounding may change the tensor."""
NOISE = 4.0
"""Factor on the measured rounding noise up to which differences are expected."""
GRADIENTS = (Moment.UNCLIPPED, Moment.GRADIENT)
"""Points in a step whose tensors are gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Function that returns the allowed distance between both runs for a tensor: the largest distance explained by rounding."""

    first: RecordedRun
    """Run A."""
    moved: tuple[RecordedRun, ...]
    """Moved runs: run A, repeated with initial parameters that are perturbed in the last bit."""

    def __call__(self, key: Key) -> float:
        """Allowed distance to one of run A's tensors; 0 for integers."""
        return FLOOR * self.first.tensors[key].eps * self.first.size(key) + NOISE * self.noise(key)

    def between(self, key: Key, second: RecordedRun) -> float:
        """Return the allowed distance between runs A and B for one tensor.

        It is larger if only one run's optimizer updates copies of the parameters in another dtype.
        """
        return FLOOR * rounding_of(key, self.first, second) + NOISE * self.noise(key)

    def noise(self, key: Key) -> float:
        """Largest distance between run A and a moved run for one tensor; 0 without moved runs."""
        value = self.first.tensors[key].sketch.value
        others = [run.tensors[key].sketch.value for run in self.moved if key in run.tensors]
        return max((value.distance(other) for other in others if value is not None and other is not None), default=0.0)

    def of_number(self, eps: float, value: float, moved: Sequence[float]) -> float:
        """Return the allowed distance for a number such as a loss.

        `value` is run A's number, and `moved` has the moved runs' numbers.
        """
        return FLOOR * eps * abs(value) + NOISE * max((abs(other - value) for other in moved), default=0.0)


def keys_of(first: RecordedRun, second: RecordedRun) -> list[Key]:
    """Return all tensors' keys in training order. Points in training are left out if only one run recorded them."""
    order, in_both, partial = list(Moment), first.moments & second.moments, first.partial | second.partial
    found = [key for key in dict.fromkeys([*first.tensors, *second.tensors]) if key[:2] in in_both and key not in partial]
    return sorted(found, key=lambda key: (key[0], order.index(key[1])))


def compare_tensors(
    keys: Sequence[Key], first: RecordedRun, second: RecordedRun, tolerance: Tolerance
) -> Iterator[TensorDifference]:
    """Yield the comparison of each tensor in `keys`, for runs A and B."""
    for key in keys:
        step, moment, name = key
        one, other = first.tensors.get(key), second.tensors.get(key)
        found = TensorDifference(step=step, moment=moment, tensor=name, difference=Difference.MISSING)
        if one is None or other is None:
            run, has = (second, one) if other is None else (first, other)
            yield _missing(found, run, has)
        else:
            compared = (
                _other_form(found, first, one, second, other)
                or _not_finite(found, one, other)
                or _values(found, one, other, tolerance.between(key, second))
            )
            is_value = compared.difference is Difference.VALUE and compared.is_different
            if is_value and may_round_inside(first, key, compared.distance):
                compared = replace(compared, is_undecided=True, detail=ABOUT_MUON)
            yield compared


def _missing(found: TensorDifference, lacks: RecordedRun, tensor: RecordedTensor | None) -> TensorDifference:
    """Describe a tensor found in one run only.

    A zero gradient counts as equal to a missing one: if it matters, the update differs.
    """
    value = None if tensor is None else tensor.sketch.value
    if found.moment in GRADIENTS and value is not None and value.squares == 0.0:
        return replace(found, difference=Difference.VALUE, detail=f"zero, and none in {lacks.name}")
    return replace(found, detail=f"not in {lacks.name}")


def _other_form(
    found: TensorDifference, first: RecordedRun, one: RecordedTensor, second: RecordedRun, other: RecordedTensor
) -> TensorDifference | None:
    """Describe a tensor whose shape or dtype differs, or whose parts leave out or repeat elements."""
    forms = ((Difference.SHAPE, one.shapes, other.shapes), (Difference.DTYPE, one.dtypes, other.dtypes))
    for kind, expected, actual in forms:
        is_copy = kind is Difference.DTYPE and (one.model_dtype or other.model_dtype)
        if len({*expected, *actual}) > 1 and not is_copy:
            detail = f"{' and '.join(actual)} in B, {' and '.join(expected)} in A"
            is_part = kind is Difference.SHAPE and (_may_have_parts(first, one, other) or _may_have_parts(second, other, one))
            advice = "; if your ranks have parts of this tensor, pass `cuts` to `record`" if is_part else ""
            return replace(found, difference=kind, detail=f"{detail}{advice}", is_undecided=is_part)
    for run, tensor in ((first, one), (second, other)):
        if tensor.sketch.cover is not Cover.ONCE:
            why = "some elements are on no rank" if tensor.sketch.cover is Cover.HOLES else "parts of ranks overlap"
            return replace(found, detail=f"{why} of {run.name}", is_undecided=True)
    return None


def _may_have_parts(run: RecordedRun, own: RecordedTensor, other: RecordedTensor) -> bool:
    """Whether a run's ranks may hold shards that were recorded as full tensors."""
    return len(own.ranks) > 1 and 0 < own.numel < other.numel and other.numel % own.numel == 0 and len(run.ranks) > 1


def _not_finite(found: TensorDifference, one: RecordedTensor, other: RecordedTensor) -> TensorDifference | None:
    if one.is_finite and other.is_finite:
        return None
    is_undecided = not (one.is_finite or other.is_finite)
    which = "both runs have" if is_undecided else f"{'B' if one.is_finite else 'A'} has"
    return replace(found, difference=Difference.NAN, detail=f"{which} NaN or infinite values", is_undecided=is_undecided)


def _values(found: TensorDifference, one: RecordedTensor, other: RecordedTensor, allowed: float) -> TensorDifference:
    eps = max(one.eps, other.eps)
    for which, tensor in (("A", one), ("B", other)):
        for replicas in tensor.sketch.replicas:
            first = replicas[0].value
            apart = max((part.value.distance(first) for part in replicas if part.value is not first), default=0.0)
            if apart > allowed:
                ranks = name_ranks([part.rank for part in replicas])
                return replace(
                    found,
                    difference=Difference.RANKS_DISAGREE,
                    distance=apart,
                    allowed=allowed,
                    eps=eps,
                    detail=f"{ranks} of {which} disagree by {apart:.3g}, rounding explains {allowed:.2g}",
                )
    before, after = one.sketch.value, other.sketch.value
    assert before is not None
    assert after is not None
    return TensorDifference(  # `replace` would take most of the time
        step=found.step,
        moment=found.moment,
        tensor=found.tensor,
        difference=Difference.VALUE,
        distance=before.distance(after),
        norm=before.norm,
        allowed=allowed,
        eps=eps,
    )
