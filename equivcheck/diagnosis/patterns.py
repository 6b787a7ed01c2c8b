"""Patterns in the first tensors that differ.

A pattern is reported as a hint, not a proof, if no known mistake explains the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.words import count_description, name_ranks, rows_of_tensor, tensors
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.pieces import TensorsByName, select_piece, values_by_piece
from equivcheck.worlds.trace.tensors import Vector

NEAR = 1e-6
"""Relative difference within which two values count as equal in a pattern."""


NO_PROOF = "(a pattern in the values, not a proof: no known fault reproduces them)"


def pattern_of(diverged: Evidence, types: Sequence[tuple[torch.dtype, str]] = ()) -> Diagnosis | None:
    """Describe the first pattern found in the differences, such as a constant factor. None if there is none.

    A pattern is a hint and no proof. `types` lists element types to which values may have been rounded, with names.
    """
    return next(_patterns(diverged, types), None)


def _patterns(diverged: Evidence, types: Sequence[tuple[torch.dtype, str]]) -> Iterator[Diagnosis]:
    yield from _nan(diverged)
    step, phase = diverged.first.step, diverged.first.phase
    found, expected = diverged.found_values(step, phase), diverged.expected_values(step, phase)
    names = [name for name in diverged.differing(phase) if name in found and name in expected]
    names = [name for name in names if found[name].shape == expected[name].shape and found[name].size]
    if not names:
        return
    is_one_number = sum(found[name].size for name in names) == 1  # fits many patterns by chance
    yield from _zero(diverged, names, found)
    if not is_one_number:
        # Old values come first, because initial values may have fewer digits than the training.
        yield from _stale(diverged, names, found)
        yield from _rounded(diverged, names, types, found=found, expected=expected)
    yield from _multiple(diverged, names, is_one_number=is_one_number)
    if phase is Phase.LOSS:
        yield from _logarithm(diverged, float(expected[names[0]].reshape(-1)[0]))
    yield from _moved(diverged, names, found, expected)
    yield from _disagreeing(diverged)
    yield from _partial(diverged, names, found, expected)


def _pattern(cause: Cause, words: str) -> Diagnosis:
    return Diagnosis(cause=cause, sentence=f"{words} {NO_PROOF}", exact=False)


def _nan(diverged: Evidence) -> Iterator[Diagnosis]:
    first = diverged.first
    if first.difference is Difference.NAN or first.actual == "nan":
        words = f"{_subject(diverged, [first.tensor])} NaN: the result of an asynchronous call may have been read before wait()"
        yield _pattern(Cause.READ_BEFORE_DONE, words)


def _subject(diverged: Evidence, names: list[str]) -> str:
    kind = {Phase.GRADIENT: "gradient", Phase.CLIPPING: "clipped gradient"}.get(diverged.first.phase, "")
    if len(names) == 1:
        return f"{f'the {kind} of ' if kind else ''}{tensors(names)} is"
    return f"{f'the {kind}s of ' if kind else ''}{tensors(names)} are"


def _zero(diverged: Evidence, names: list[str], found: TensorsByName) -> Iterator[Diagnosis]:
    if not any(found[name].any() for name in names):
        yield _pattern(Cause.GRADIENT_LOST, f"{_subject(diverged, names)} zero")


def _rounded(
    diverged: Evidence,
    names: list[str],
    types: Sequence[tuple[torch.dtype, str]],
    *,
    found: TensorsByName,
    expected: TensorsByName,
) -> Iterator[Diagnosis]:
    """Yield a hint if values are rounded.

    Values on one device that the type can represent as well, such as small whole numbers, are no evidence for rounding.
    """
    for kind, name in types:
        if all(_holds(kind, found[each]) for each in names) and not all(_holds(kind, expected[each]) for each in names):
            is_update = diverged.first.phase in (Phase.UPDATE, Phase.STATE)
            cause = Cause.MASTERS_IN_LOWER_PRECISION if is_update else Cause.REDUCED_IN_LOWER_PRECISION
            yield _pattern(cause, f"{_subject(diverged, names)} rounded to {name}: every element is representable in it")


def _holds(kind: torch.dtype, values: np.ndarray) -> bool:
    tensor = torch.from_numpy(values)
    return values.size > 0 and bool((tensor.to(kind).to(tensor.dtype) == tensor).all())


def _stale(diverged: Evidence, names: list[str], found: TensorsByName) -> Iterator[Diagnosis]:
    for step in range(diverged.first.step - 1, -1, -1):
        before = diverged.found_values(step, diverged.first.phase)
        if all(name in before and np.allclose(found[name], before[name], rtol=NEAR, atol=0.0) for name in names):
            yield _pattern(Cause.STALE, f"{_subject(diverged, names)} equal to the value of step {step}")
    initial = diverged.right_initial_values
    starts = {name: initial.get(name.partition("/")[0]) for name in names}
    if all(start is not None and np.array_equal(found[name], start) for name, start in starts.items()):
        yield _pattern(Cause.STALE, f"{_subject(diverged, names)} equal to the initial values")


def _multiple(diverged: Evidence, names: list[str], *, is_one_number: bool) -> Iterator[Diagnosis]:
    """Yield a constant factor. A single number counts only if its factor is a known count, such as the number of ranks."""
    ratio = diverged.ratio(names, diverged.first.phase)
    if ratio is not None and (not is_one_number or count_description(diverged, ratio)):
        words = f"{_subject(diverged, names)} {ratio:g} times as large as on one device"
        yield _pattern(Cause.SCALED, words + count_description(diverged, ratio))


def _logarithm(diverged: Evidence, expected: float) -> Iterator[Diagnosis]:
    """Find a loss, averaged over ranks, that is off by the logarithm of a known count."""
    losses = [trace.steps[diverged.first.step].loss for trace in diverged.traces]
    excess = float(np.mean([loss for loss in losses if loss is not None])) - expected
    way, why = ("larger", ": a softmax may count each class several times") if excess > 0 else ("smaller", "")
    for number, words in diverged.counts.items():
        if number > 1 and math.isclose(abs(excess), math.log(number), rel_tol=NEAR):
            what = f"the loss is log({number}) {way} than on one device, the logarithm of the number of {words}{why}"
            yield _pattern(Cause.SOFTMAX_OF_PART, what)


def _moved(diverged: Evidence, names: list[str], found: TensorsByName, expected: TensorsByName) -> Iterator[Diagnosis]:
    some = [name for name in names if found[name].size > 1 and not _is_close(found[name], expected[name])]
    if not some or len(some) < len(names):
        return
    if all(found[name].ndim > 1 and _is_close(found[name], _transposed(expected[name])) for name in some):
        yield _pattern(Cause.PERMUTED, f"{_subject(diverged, some)} transposed: the right elements along the wrong dim")
    elif all(_is_close(np.sort(found[name], None), np.sort(expected[name], None)) for name in some):
        yield _pattern(Cause.PERMUTED, f"{_subject(diverged, some)} permuted: the right elements in wrong places")
    zero = {name: (found[name] == 0.0) & (expected[name] != 0.0) for name in some}
    if all(mask.any() and _is_close(found[name][~mask], expected[name][~mask]) for name, mask in zero.items()):
        yield _pattern(
            Cause.GRADIENT_LOST,
            f"{rows_of_tensor(zero)} {'is' if len(zero) == 1 else 'are'} zero, and all other elements are right",
        )


def _transposed(values: Vector) -> Vector:
    """Return the elements in the transposed order, in the original shape."""
    return np.asarray(values.T.reshape(values.shape))


def _is_close(one: Vector, other: Vector) -> bool:
    return bool(np.allclose(one, other, rtol=NEAR, atol=0.0))


def _disagreeing(diverged: Evidence) -> Iterator[Diagnosis]:
    first = diverged.first
    if first.difference is Difference.RANKS_DISAGREE:
        values = f"{first.actual}, not {first.expected}, and {first.elsewhere}"
        words = f"ranks disagree on `{first.tensor}`: rank {first.rank} has {values}"
        yield _pattern(Cause.RANKS_DISAGREE, words)


def _partial(diverged: Evidence, names: list[str], found: TensorsByName, expected: TensorsByName) -> Iterator[Diagnosis]:
    wrong = {name: ~np.isclose(found[name], expected[name], rtol=NEAR, atol=0.0, equal_nan=True) for name in names}
    wrong = {name: mask for name, mask in wrong.items() if mask.any()}
    ranks = _ranks_with(diverged, wrong)
    if wrong and len(ranks) < len(diverged.traces) and len(diverged.traces) > 1:
        words = f"{tensors(list(wrong))} {'differs' if len(wrong) == 1 else 'differ'} on {name_ranks(ranks)} only"
        yield _pattern(Cause.PART_OF_TENSOR, words)
    # An element that is zero on both sides may belong to an unused row of an embedding, so it is no evidence for a right row.
    masks = {name: mask | ((found[name] == 0.0) & (expected[name] == 0.0)) for name, mask in wrong.items()}
    if not all(mask.all() for mask in masks.values()) and all(mask.ndim for mask in masks.values()):
        partly_first = dict(sorted(masks.items(), key=lambda each: bool(each[1].all())))
        yield _pattern(Cause.PART_OF_TENSOR, f"the difference is limited to {rows_of_tensor(partly_first)}")


def _ranks_with(diverged: Evidence, wrong: dict[str, np.ndarray]) -> list[int]:
    for expected, found in zip(diverged.reference.moments, diverged.found, strict=True):
        if (expected.step, expected.phase) == (diverged.first.step, diverged.first.phase):
            return [
                rank
                for rank, moment in enumerate(found)
                if any(
                    piece.name in wrong
                    and wrong[piece.name].shape == piece.shape
                    and select_piece(wrong[piece.name], piece).any()
                    for piece, _ in values_by_piece(moment.snapshot)
                )
            ]
    return []
