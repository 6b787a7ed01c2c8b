"""Mistakes that minimum, maximum and norm show: values rounded to a coarser dtype, and shards with each other's values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import Candidate
from equivcheck.recording.causes.evidence import Evidence, rms
from equivcheck.recording.compare.runs import RecordedTensor, eps_of
from equivcheck.worlds.trace.trace import Piece

COARSE = ("bfloat16", "float16")
"""Dtypes to try."""
FEWEST = 4
"""Least number of rounded values. Fewer values may have few digits by chance."""
SAME = 1e-12
"""Relative tolerance for sums of the same squares in another order."""


def rounded_values(evidence: Evidence, cause: Cause, noun: str) -> Iterator[Candidate]:
    """Yield the mistake that values are rounded to a coarser dtype.

    It is yielded for each dtype that exactly represents the minimum and maximum of each wrong tensor in run B. In run A, the
    dtype must not represent more than half of these numbers exactly. `noun` says which values are rounded, such as ``gradients``.
    """
    for dtype in COARSE:
        found, right = (
            [value for name in evidence.wrong for value in _extremes(run.tensors[evidence.step, evidence.moment, name])]
            for run in (evidence.second, evidence.first)
        )
        are_fine = all(
            evidence.first.tensors[evidence.step, evidence.moment, name].eps < eps_of(dtype) for name in evidence.wrong
        )
        is_right_rounded = 2 * sum(_has_digits(value, dtype) for value in right) > len(right)
        if are_fine and len({*found}) >= FEWEST and all(_has_digits(value, dtype) for value in found) and not is_right_rounded:
            errors = {name: _rounding_error(evidence, name, eps_of(dtype)) for name in evidence.wrong}
            yield Candidate(cause=cause, words=f"{{{noun}}} rounded to {dtype}", errors=errors, is_exact=False)


def _extremes(tensor: RecordedTensor) -> list[float]:
    """Return minimum and maximum of each part, without zeros."""
    found = (value for entry in tensor.distinct for value in (entry.sketch.minimum, entry.sketch.maximum))
    return [value for value in found if value]


def _has_digits(value: float, dtype: str) -> bool:
    return float(torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype))) == value


def _rounding_error(evidence: Evidence, name: str, eps: float) -> float:
    """Return 0 if rounding to this machine epsilon explains the distance, else infinity."""
    expected = evidence.expected_sums[name]
    return 0.0 if rms(evidence.found_sums[name] - expected) <= eps * rms(expected) else math.inf


def shards_with_equal_values(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the mistake that gradients were reduced over ranks that hold different shards.

    It is yielded only if different shards have the same values.
    """
    ranks: set[int] = set()
    for name in evidence.wrong:
        own = _ranks_with_equal_shards(evidence.second.tensors[evidence.step, evidence.moment, name])
        if not own:
            return
        ranks |= own
    words = f"{{gradients}} the same in different shards: reduced over {name_ranks(sorted(ranks))}, which hold other shards"
    errors = dict.fromkeys(evidence.wrong, 0.0)
    yield Candidate(cause=Cause.REDUCED_OVER_OTHERS, words=words, errors=errors, is_exact=False)


def _ranks_with_equal_shards(tensor: RecordedTensor) -> set[int]:
    """Return a tensor's ranks if each shard has another shard's values; otherwise an empty set."""
    shards: dict[Piece, tuple[int, float, float, float]] = {}
    for rank, entry in zip(tensor.ranks, tensor.entries, strict=True):
        shards.setdefault(entry.piece, (rank, entry.sketch.squares, entry.sketch.minimum, entry.sketch.maximum))
    found = list(shards.values())
    for number, (_, squares, least, most) in enumerate(found):
        others = [each for at, each in enumerate(found) if at != number]
        is_same = (math.isclose(each[1], squares, rel_tol=SAME) and each[2:] == (least, most) for each in others)
        if least == most or not any(is_same):
            return set()
    return {rank for rank, *_ in found}
