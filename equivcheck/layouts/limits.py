"""Limits that several layouts have, and how a limit finds the parallelism that it is about."""

from __future__ import annotations

from typing import TypeVar

from equivcheck.layouts.kind import Limit
from equivcheck.layouts.mends import all_multiples, with_rows
from equivcheck.scenario import Layout, Parallelism

P = TypeVar("P", bound=Parallelism)


def parallelism_of(layout: Layout, kind: type[P]) -> P:
    """The parallelism of one kind in a layout that has it."""
    found = next((parallelism for parallelism in layout.parallelisms if isinstance(parallelism, kind)), None)
    assert found is not None, "limits are asked only about layouts that have the parallelism"
    return found


EVEN_ROWS = Limit(
    reason="a microbatch whose rows are not a multiple of the data-parallel ranks cannot be split evenly over them",
    applies=lambda training, layout: not all_multiples(training.data.microbatches, layout.num_data_ranks),
    mend=lambda training, layout: with_rows(training, layout.num_data_ranks),
)
