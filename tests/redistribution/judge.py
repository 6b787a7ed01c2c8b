"""Whether what redistributions left on ranks is what the NumPy model says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redistribution import model
from redistribution.cases import Coordinate, Redistribution
from redistribution.model import Array
from redistribution.programs import Result

LINEAR = ("", "sum")
"""How addends are put together where torch has the gradient; see `differences` for others."""


def first_wrong(case: Redistribution, results: Sequence[Result], *, gradients: bool) -> str:
    """What is the first that is not the model's on some rank, in words (exactly: numbers are whole); empty if nothing is."""
    told = [
        _first_wrong(case, coordinate, result, gradients) for coordinate, result in zip(case.coordinates(), results, strict=True)
    ]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")


def _first_wrong(case: Redistribution, coordinate: Coordinate, result: Result, gradients: bool) -> str:
    expected = expected_of(case, coordinate)
    if not gradients:
        del expected["gradient"]
    for name, array in expected.items():
        found = getattr(result, name)
        if found is None:
            return result.error
        if not same(found, array):
            return f"{name} is {found.tolist()} instead of {array.tolist()}"
    return result.error


def expected_of(case: Redistribution, coordinate: Coordinate) -> dict[str, Array]:
    """By the names of a result's fields, what it should be."""
    return {
        "before": model.source_part(case, coordinate),
        "after": model.target_part(case, coordinate),
        "gradient": model.gradient_part(case, coordinate),
    }


def same(found: Array | None, expected: Array | None) -> bool:
    """Whether two arrays have the same shape, type and values, or neither is there."""
    if found is None or expected is None:
        return found is expected
    return found.shape == expected.shape and found.dtype == expected.dtype and np.array_equal(found, expected)


def assert_right(cases: Sequence[Redistribution], by_rank: Sequence[Sequence[Result]]) -> None:
    """All of a batch, by rank and then by case, is the model's."""
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        wrong = first_wrong(case, results, gradients=case.op in LINEAR)
        assert not wrong, f"{wrong}, of {case}"
