"""Sweeps over placements."""

from __future__ import annotations

import json

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.nouns import Leaf
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.programs.sweep.sweep import run_sweep
from equivcheck.report.sweep_text import sweep_object


def first_placements(mesh: tuple[int, ...], name: str) -> set[tuple[str, ...]]:
    """Placements used for an operation's first argument."""
    leaves = (program.statements[0] for program in Sweep(mesh=mesh, operations=(name,)).programs())
    return {leaf.placements for leaf in leaves if isinstance(leaf, Leaf)}


def test_every_placement_of_the_first_argument_is_there() -> None:
    """Replicated, sharded along each dim, and partial with each reduction."""
    assert first_placements((2,), "relu") == {("R",), ("S(0)",), ("S(1)",), ("S(2)",), ("P(sum)",), ("P(avg)",), ("P(max)",)}


def test_a_dim_may_be_cut_by_both_axes() -> None:
    """On two axes all combinations exist, except two partial placements."""
    found = first_placements((2, 2), "mm")
    assert {("S(0)", "S(0)"), ("S(1)", "S(0)"), ("P(sum)", "R"), ("R", "P(sum)")} < found
    assert ("P(sum)", "P(sum)") not in found


def test_every_operation_is_swept() -> None:
    """Every operation has programs."""
    assert [name for name in OPERATIONS if next(Sweep(operations=(name,)).programs(), None) is None] == []


def test_what_is_swept_is_counted() -> None:
    """A correct operation leaves no group, and its programs are counted."""
    found = run_sweep(Sweep(operations=("neg",)).programs())
    assert found.groups == {}
    assert found.outcomes[Outcome.EQUIVALENT] == found.agreed["neg"] > 30
    assert json.loads(json.dumps(sweep_object(found)))["differ"] == []


def test_what_was_run_before_the_end_is_kept() -> None:
    """A deadline or an interruption ends a sweep between two programs, and the result says so."""
    over = iter((False, False, True))
    found = run_sweep(Sweep(operations=("neg",)).programs(), is_over=lambda: next(over))
    assert found.stopped
    assert found.outcomes.total() + found.num_clones == 2
