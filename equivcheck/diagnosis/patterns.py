"""What can be said of values that no known way to be wrong explains: plain patterns in what differs first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.precision import KINDS
from equivcheck.diagnosis.scaled import ratio_of
from equivcheck.diagnosis.words import listed, number_of, rows_of_tensor, tensors
from equivcheck.trace.differences import Difference, Phase
from equivcheck.trace.pieces import Whole, part_of, parts_of
from equivcheck.verdict.cause import Cause, Diagnosis

NEAR = 1e-6
"""Share of a value by which two may differ and still be called alike in a pattern."""


SCALARS = ("loss", "norm")
"""Of one number, a ratio says nothing unless it is the number of something."""


def pattern_of(case: Case) -> Diagnosis | None:
    """The first pattern that fits."""
    return next(_patterns(case), None)


def _patterns(case: Case) -> Iterator[Diagnosis]:
    yield from _unread(case)
    found, expected = case.whole(case.first.step, case.first.phase), case.expected_values(case.first.step, case.first.phase)
    names = [name for name in case.differing(case.first.phase) if name in found and name in expected]
    names = [name for name in names if found[name].shape == expected[name].shape and found[name].size]
    if not names:
        return
    yield from _zero(case, names, found)
    yield from _rounded(case, names, found)
    yield from _earlier(case, names, found)
    yield from _multiple(case, names)
    yield from _disagreeing(case)
    yield from _partial(case, names, found, expected)


def _pattern(cause: Cause, words: str) -> Diagnosis:
    return Diagnosis(cause=cause, sentence=words, exact=False)


def _unread(case: Case) -> Iterator[Diagnosis]:
    if case.first.difference is Difference.NAN or case.first.actual == "nan":
        words = f"{_what(case, [case.first.tensor])} NaN, as what communication brings is until it has been waited for"
        yield _pattern(Cause.READ_BEFORE_DONE, words)


def _what(case: Case, names: list[str]) -> str:
    phase = case.first.phase
    kind = {Phase.GRADIENT: "the gradient of ", Phase.CLIPPING: "the clipped gradient of "}.get(phase, "")
    return f"{kind}{tensors(names)} {'is' if len(names) == 1 else 'are'}"


def _zero(case: Case, names: list[str], found: Whole) -> Iterator[Diagnosis]:
    if not any(found[name].any() for name in names):
        yield _pattern(Cause.GRADIENT_LOST, f"{_what(case, names)} zero")


def _rounded(case: Case, names: list[str], found: Whole) -> Iterator[Diagnosis]:
    """Values that a lower precision can hold, all of them, up to a power of two."""
    for kind in KINDS if case.rounding is None else ():
        name = str(kind).removeprefix("torch.")
        if name != case.scenario.training.precision.value and all(_holds(kind, found[each]) for each in names):
            is_update = case.first.phase in (Phase.UPDATE, Phase.STATE)
            cause = Cause.MASTERS_IN_LOWER_PRECISION if is_update else Cause.REDUCED_IN_LOWER_PRECISION
            yield _pattern(cause, f"{_what(case, names)} rounded to {name}: every element is one that it can hold")


def _holds(kind: torch.dtype, values: np.ndarray) -> bool:
    tensor = torch.from_numpy(values)
    return values.size > 0 and bool((tensor.to(kind).to(tensor.dtype) == tensor).all())


def _earlier(case: Case, names: list[str], found: Whole) -> Iterator[Diagnosis]:
    for step in range(case.first.step - 1, -1, -1):
        before = case.whole(step, case.first.phase)
        if all(name in before and np.allclose(found[name], before[name], rtol=NEAR, atol=0.0) for name in names):
            yield _pattern(Cause.STALE, f"{_what(case, names)} what step {step} left")


def _multiple(case: Case, names: list[str]) -> Iterator[Diagnosis]:
    ratio = ratio_of(case, names, case.first.phase)
    if ratio is not None and (case.first.tensor not in SCALARS or number_of(case, ratio)):
        yield _pattern(Cause.SCALED, f"{_what(case, names)} {ratio:g} times what it should be{number_of(case, ratio)}")


def _disagreeing(case: Case) -> Iterator[Diagnosis]:
    if case.first.difference is Difference.RANKS_DISAGREE:
        words = (
            f"ranks disagree on `{case.first.tensor}`: rank {case.first.rank} has {case.first.actual}, not {case.first.expected}"
        )
        yield _pattern(Cause.RANKS_DISAGREE, words)


def _partial(case: Case, names: list[str], found: Whole, expected: Whole) -> Iterator[Diagnosis]:
    wrong = {name: ~np.isclose(found[name], expected[name], rtol=NEAR, atol=0.0, equal_nan=True) for name in names}
    wrong = {name: mask for name, mask in wrong.items() if mask.any()}
    ranks = _ranks_with(case, wrong)
    if wrong and len(ranks) < len(case.traces) and len(case.traces) > 1:
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {listed([str(rank) for rank in ranks])} have"
        yield _pattern(Cause.PART_OF_TENSOR, f"only what {who} of {tensors(list(wrong))} differs")
    if wrong and not all(mask.all() for mask in wrong.values()) and all(mask.ndim for mask in wrong.values()):
        yield _pattern(Cause.PART_OF_TENSOR, f"only {rows_of_tensor(wrong)} differ")


def _ranks_with(case: Case, wrong: dict[str, np.ndarray]) -> list[int]:
    """The ranks that hold any wrong element."""
    for expected, found in zip(case.reference.moments, case.found, strict=True):
        if (expected.step, expected.phase) == (case.first.step, case.first.phase):
            return [
                rank
                for rank, moment in enumerate(found)
                if any(
                    piece.name in wrong and wrong[piece.name].shape == piece.shape and part_of(wrong[piece.name], piece).any()
                    for piece, _ in parts_of(moment.snapshot)
                )
            ]
    return []
