"""Plain patterns in what differs first, told where no counterfactual explains it: a hint, no proof."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from equivcheck.diagnosis.catalogue.precision import other_types
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.words import number_of, numbered, rows_of_tensor, tensors
from equivcheck.trace.differences import Difference, Phase
from equivcheck.trace.pieces import Whole, part_of, parts_of
from equivcheck.verdict.cause import Cause, Diagnosis

NEAR = 1e-6
"""Share of a value by which two may differ and still be called alike in a pattern."""


NO_PROOF = "(a pattern in the values, no proof: no known fault reproduces them)"

SCALARS = ("loss", "norm")
"""Of one number, a ratio is no pattern unless it is the number of something."""


def pattern_of(diverged: DivergedRun) -> Diagnosis | None:
    """The first pattern that fits."""
    return next(_patterns(diverged), None)


def _patterns(diverged: DivergedRun) -> Iterator[Diagnosis]:
    yield from _unread(diverged)
    step, phase = diverged.first.step, diverged.first.phase
    found, expected = diverged.found_values(step, phase), diverged.expected_values(step, phase)
    names = [name for name in diverged.differing(phase) if name in found and name in expected]
    names = [name for name in names if found[name].shape == expected[name].shape and found[name].size]
    if not names:
        return
    yield from _zero(diverged, names, found)
    yield from _rounded(diverged, names, found)
    yield from _earlier(diverged, names, found)
    yield from _multiple(diverged, names)
    yield from _disagreeing(diverged)
    yield from _partial(diverged, names, found, expected)


def _pattern(cause: Cause, words: str) -> Diagnosis:
    return Diagnosis(cause=cause, sentence=f"{words} {NO_PROOF}", exact=False)


def _unread(diverged: DivergedRun) -> Iterator[Diagnosis]:
    first = diverged.first
    if first.difference is Difference.NAN or first.actual == "nan":
        words = f"{_what(diverged, [first.tensor])} NaN, as the result of an asynchronous call is until it has been waited for"
        yield _pattern(Cause.READ_BEFORE_DONE, words)


def _what(diverged: DivergedRun, names: list[str]) -> str:
    kind = {Phase.GRADIENT: "gradient", Phase.CLIPPING: "clipped gradient"}.get(diverged.first.phase, "")
    if len(names) == 1:
        return f"{f'the {kind} of ' if kind else ''}{tensors(names)} is"
    return f"{f'the {kind}s of ' if kind else ''}{tensors(names)} are"


def _zero(diverged: DivergedRun, names: list[str], found: Whole) -> Iterator[Diagnosis]:
    if not any(found[name].any() for name in names):
        yield _pattern(Cause.GRADIENT_LOST, f"{_what(diverged, names)} zero")


def _rounded(diverged: DivergedRun, names: list[str], found: Whole) -> Iterator[Diagnosis]:
    """Values that a lower precision can hold, all of them, up to a power of two."""
    for kind, name in other_types(diverged) if diverged.rounding is None else ():
        if all(_holds(kind, found[each]) for each in names):
            is_update = diverged.first.phase in (Phase.UPDATE, Phase.STATE)
            cause = Cause.MASTERS_IN_LOWER_PRECISION if is_update else Cause.REDUCED_IN_LOWER_PRECISION
            yield _pattern(cause, f"{_what(diverged, names)} rounded to {name}: every element is representable in it")


def _holds(kind: torch.dtype, values: np.ndarray) -> bool:
    tensor = torch.from_numpy(values)
    return values.size > 0 and bool((tensor.to(kind).to(tensor.dtype) == tensor).all())


def _earlier(diverged: DivergedRun, names: list[str], found: Whole) -> Iterator[Diagnosis]:
    for step in range(diverged.first.step - 1, -1, -1):
        before = diverged.found_values(step, diverged.first.phase)
        if all(name in before and np.allclose(found[name], before[name], rtol=NEAR, atol=0.0) for name in names):
            yield _pattern(Cause.STALE, f"{_what(diverged, names)} equal to the value of step {step}")


def _multiple(diverged: DivergedRun, names: list[str]) -> Iterator[Diagnosis]:
    ratio = diverged.ratio(names, diverged.first.phase)
    if ratio is not None and (diverged.first.tensor not in SCALARS or number_of(diverged, ratio)):
        words = f"{_what(diverged, names)} {ratio:g} times what one device computes"
        yield _pattern(Cause.SCALED, words + number_of(diverged, ratio))


def _disagreeing(diverged: DivergedRun) -> Iterator[Diagnosis]:
    first = diverged.first
    if first.difference is Difference.RANKS_DISAGREE:
        values = f"{first.actual}, not {first.expected}, and {first.elsewhere}"
        words = f"ranks disagree on `{first.tensor}`: rank {first.rank} has {values}"
        yield _pattern(Cause.RANKS_DISAGREE, words)


def _partial(diverged: DivergedRun, names: list[str], found: Whole, expected: Whole) -> Iterator[Diagnosis]:
    wrong = {name: ~np.isclose(found[name], expected[name], rtol=NEAR, atol=0.0, equal_nan=True) for name in names}
    wrong = {name: mask for name, mask in wrong.items() if mask.any()}
    ranks = _ranks_with(diverged, wrong)
    if wrong and len(ranks) < len(diverged.traces) and len(diverged.traces) > 1:
        words = f"{tensors(list(wrong))} {'differs' if len(wrong) == 1 else 'differ'} on {numbered(ranks)} only"
        yield _pattern(Cause.PART_OF_TENSOR, words)
    if wrong and not all(mask.all() for mask in wrong.values()) and all(mask.ndim for mask in wrong.values()):
        yield _pattern(Cause.PART_OF_TENSOR, f"nothing differs but {rows_of_tensor(wrong)}")


def _ranks_with(diverged: DivergedRun, wrong: dict[str, np.ndarray]) -> list[int]:
    """The ranks that hold any wrong element."""
    for expected, found in zip(diverged.reference.moments, diverged.found, strict=True):
        if (expected.step, expected.phase) == (diverged.first.step, diverged.first.phase):
            return [
                rank
                for rank, moment in enumerate(found)
                if any(
                    piece.name in wrong and wrong[piece.name].shape == piece.shape and part_of(wrong[piece.name], piece).any()
                    for piece, _ in parts_of(moment.snapshot)
                )
            ]
    return []
