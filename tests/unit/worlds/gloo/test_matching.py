"""Mismatched collectives are reported before they run; matching ones run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from equivcheck.worlds.failure import FailureKind, RanksFailed, RankState
from equivcheck.worlds.gloo.matching import table
from equivcheck.worlds.gloo.matching.journal import Issued, Journal
from equivcheck.worlds.gloo.matching.table import Table, table_file
from equivcheck.worlds.gloo.world import GlooRanks
from unit.worlds.gloo import collective_programs as programs

ON = "on ranks (0, 1), call"


@pytest.mark.parametrize(
    ("program", "first", "second"),
    [
        (programs.reductions, f"all_reduce.sum float32[4] {ON} 0", f"all_reduce.max float32[4] {ON} 0"),
        (programs.functional_reductions, f"all_reduce.sum float32[4] {ON} 0", f"all_reduce.max float32[4] {ON} 0"),
        (programs.types, f"all_reduce.sum float32[4] {ON} 0", f"all_reduce.sum int32[4] {ON} 0"),
        (programs.second_sizes, f"all_gather float32[4] float32[2] {ON} 0", f"all_gather float32[4] float32[3] {ON} 0"),
        (programs.sizes, f"all_reduce.sum float32[4] {ON} 0", f"all_reduce.sum float32[5] {ON} 0"),
        (programs.roots, f"broadcast with rank 0 float32[4] {ON} 0", f"broadcast with rank 1 float32[4] {ON} 0"),
        (programs.kinds, f"barrier {ON} 0", f"all_reduce.sum float32[4] {ON} 0"),
        (programs.reducers, f"all_reduce.sum float32[6] {ON} 3", f"all_reduce.sum float32[4] {ON} 3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_calls_that_do_not_match_are_named(ranks: GlooRanks, program: Callable[[], Any], first: str, second: str) -> None:
    """A different operation, reduction, element type, size or root is a mismatch, with both calls and their stacks."""
    ranks.run(programs.shapes)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(program)
    found = caught.value.failure
    assert found.kind is FailureKind.MISMATCH
    assert found.summary == f"collectives do not match: rank 0 issued {first}, but rank 1 issued {second}"
    assert [(report.state, report.pending) for report in found.reports] == [
        (RankState.WAITING, first),
        (RankState.WAITING, second),
    ]
    assert all(f"in {program.__name__}\n" in report.stack.splitlines(keepends=True)[0] for report in found.reports)
    assert not any("equivcheck/worlds/gloo" in report.stack for report in found.reports)


def test_a_call_of_many_tensors_is_named_with_some(ranks: GlooRanks) -> None:
    """Tensors that do not fit are left out of the text, but not out of the comparison."""
    with pytest.raises(RanksFailed, match=r"rank 0 issued all_reduce.sum float32\[100, 1\] .*, but rank 1 .*float32\[100, 2\]"):
        ranks.run(programs.many_tensors)


def test_calls_that_match_are_left_alone(ranks: GlooRanks) -> None:
    """Accepts shapes with equal element counts, groups in any order, calls far ahead of other ranks, and reused group names."""
    assert ranks.run(programs.shapes).values == ([2.0] * 4,) * 2
    assert ranks.run(programs.groups_in_any_order).values == ([[2.0], [2.0, 2.0]],) * 2
    assert ranks.run(programs.far_ahead, 300).values == (600.0, 600.0)
    for numbers in ((1, 2, 3), (3, 1)):
        assert ranks.run(programs.groups_of_one_name, numbers).values == ([2.0 * number for number in numbers],) * 2


def test_a_call_that_replaced_another_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the table is full, a late member is accepted and never compared with another call."""
    monkeypatch.setattr(table, "_NUM_SLOTS", 2)
    with table_file() as file:
        shared = Table(file.fileno())
        early, late = Journal(0, shared), Journal(1, shared)
        calls = [Issued("all_reduce.sum", ((size,),), ("float32",)) for size in range(5)]
        assert not any(early.mismatch(call, "0", (0, 1)) for call in calls)
        assert not any(late.mismatch(call, "0", (0, 1)) for call in calls)
        early.begin()
        assert early.mismatch(calls[0], "0", (0, 1)) is None
        late.begin()
        assert late.mismatch(calls[1], "0", (0, 1)) is not None
