"""Every collective, in sim and over gloo, against the NumPy model: any shape, type, reduction, root, group and size."""

from __future__ import annotations

from hypothesis import given, settings

from collectives.cases import Case, batches
from collectives.judge import assert_received, assert_withheld
from collectives.programs import run_batch
from collectives.worlds import run_in

EXAMPLES = max(40, settings().max_examples // 2)
"""Batches of up to twelve calls."""


def assert_agree(size: int, cases: tuple[Case, ...]) -> None:
    """Both worlds give what the model says, and sim shows nothing before the wait."""
    for world in ("sim", "gloo"):
        by_rank = run_in(world, size, run_batch, cases, world == "sim")
        for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
            assert_received(case, results)
            for rank in case.group if world == "sim" else ():
                assert_withheld(case, results[rank], case.group.index(rank))


@settings(max_examples=EXAMPLES, deadline=None)
@given(batches("reductions"))
def test_reductions(batch: tuple[int, tuple[Case, ...]]) -> None:
    """What is reduced is what NumPy reduces: exact where arithmetic is, else within what rounding can do in any order."""
    assert_agree(*batch)


@settings(max_examples=EXAMPLES, deadline=None)
@given(batches("moves"))
def test_moves(batch: tuple[int, tuple[Case, ...]]) -> None:
    """What is moved arrives bit for bit, whole or in parts of different sizes."""
    assert_agree(*batch)
