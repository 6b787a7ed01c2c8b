"""Tests for counting checks."""

from __future__ import annotations

from equivcheck.system.tally import record, take


def test_a_check_is_counted_once() -> None:
    """A check is not counted again after `take`."""
    take()
    for layout in ("ddp", "fsdp2", "ddp"):
        record(layout, "sim", "equivalent")
    assert take() == {("ddp", "sim", "equivalent"): 2, ("fsdp2", "sim", "equivalent"): 1}
    assert not take()
