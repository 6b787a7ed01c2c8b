"""Tests for counting checks."""

from __future__ import annotations

from equivcheck.system.tally import record_check, take_counts


def test_a_check_is_counted_once() -> None:
    """A check is not counted again after `take_counts`."""
    take_counts()
    for layout in ("ddp", "fsdp2", "ddp"):
        record_check(layout, "sim", "equivalent")
    assert take_counts() == {("ddp", "sim", "equivalent"): 2, ("fsdp2", "sim", "equivalent"): 1}
    assert not take_counts()
