"""Every collective, in sim and over gloo, against the NumPy model: any shape, type, reduction, root, group and size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from collectives.cases import KINDS, Case, Kind, batches
from collectives.judge import assert_received, assert_withheld
from collectives.programs import run_batch
from collectives.worlds import run_in

EXAMPLES = max(10, settings().max_examples // 10)
"""Batches of up to twelve calls, for each kind."""


def assert_agree(size: int, cases: tuple[Case, ...]) -> None:
    """Both worlds give what the model says, and sim shows nothing before the wait."""
    for world in ("sim", "gloo"):
        by_rank = run_in(world, size, run_batch, cases, world == "sim")
        for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
            assert_received(case, results)
            for rank in case.group if world == "sim" else ():
                assert_withheld(case, results[rank], case.group.index(rank))


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: Kind) -> None:
    """What is moved arrives bit for bit; what is reduced is exact where arithmetic is, else within what rounding can do."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(batches(kind))
    def agree(batch: tuple[int, tuple[Case, ...]]) -> None:
        assert_agree(*batch)

    agree()


@pytest.mark.parametrize("rows", [(2, 0), (0, 3), (1, 2), (3, 2)])
def test_uneven_parts_may_lie_in_any_order(rows: tuple[int, int]) -> None:
    """Parts of a reduce-scatter that have other numbers of rows, none and one among them, need not be contiguous."""
    case = Case(kind=Kind.REDUCE_SCATTER, group=(0, 1), shape=(3, 2), rows=(rows, rows), op="sum", strided=True)
    assert_agree(2, (case,))
