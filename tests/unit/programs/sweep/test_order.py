"""The order in sweeps."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from equivcheck.programs.nouns import Constant, Leaf, TensorProgram
from equivcheck.programs.nouns.placement import REPLICATE
from equivcheck.programs.sweep.order import Passes, order_in_passes
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.programs.sweep.sweep import run_sweep

OPERATIONS = ("neg", "sum_dim", "mm", "index_select")
Placements = tuple[tuple[str, ...], ...]


def placements(program: TensorProgram) -> Placements:
    """Placements by argument."""
    return tuple(each.placements for each in program.statements if isinstance(each, (Leaf, Constant)))


@pytest.fixture(scope="module")
def passes() -> Passes:
    """Four operations on a mesh with two axes."""
    return order_in_passes(Sweep(mesh=(2, 2), operations=OPERATIONS).programs())


def test_every_program_is_in_one_pass(passes: Passes) -> None:
    """No program is missing or runs twice."""
    assert Counter(passes) == Counter(Sweep(mesh=(2, 2), operations=OPERATIONS).programs())


def test_the_first_pass_has_every_placement_of_every_argument(passes: Passes) -> None:
    """It has few programs. Each uses all axes, and most have no replicated argument."""
    first = next(iter(passes.programs.values()))
    for name in OPERATIONS:
        programs = filter(_uses_both_axes, Sweep(mesh=(2, 2), operations=(name,)).programs())
        every = {each for program in programs for each in _numbered(program)}
        mine = [program for program in first if program.operations == (name,)]
        assert {each for program in mine for each in _numbered(program)} == every
        assert len(mine) <= len(every)
    placed = [placements(each) for each in first if each.operations == ("mm",)]
    assert sum((REPLICATE, REPLICATE) not in each for each in placed) > len(placed) / 2


def _uses_both_axes(program: TensorProgram) -> bool:
    return all(set(along) != {REPLICATE} for along in zip(*placements(program), strict=True))


def test_an_axis_that_has_nothing_to_do_comes_last(passes: Passes) -> None:
    """A mesh with one axis has no such programs."""
    *before, last = passes.programs.values()
    assert last
    assert not any(map(_uses_both_axes, last))
    assert all(map(_uses_both_axes, itertools.chain(*before)))
    assert not list(order_in_passes(Sweep(operations=OPERATIONS).programs()).programs.values())[-1]


def _numbered(program: TensorProgram) -> list[tuple[int, tuple[str, ...]]]:
    return list(enumerate(placements(program)))


def test_pairs_come_before_what_has_nothing_new(passes: Passes) -> None:
    """Earlier passes contain every pair of placements for two arguments."""
    *before, others, _ = passes.programs.values()
    met = {(each.operations, placements(each)) for each in itertools.chain(*before)}
    assert others
    assert {(each.operations, placements(each)) for each in others} <= met


def test_programs_that_share_a_reference_follow_each_other(passes: Passes) -> None:
    """In a pass, the same operation, shapes and dim come only once."""
    for programs in passes.programs.values():
        computed = [(each.statements[-1], *(getattr(one, "shape", None) for one in each.statements)) for each in programs]
        runs = [each for each, _ in itertools.groupby(computed)]
        assert len(runs) == len(set(runs))


def test_shards_have_all_programs(passes: Passes) -> None:
    """Every program is in exactly one shard."""
    parts = [passes.shard(number, 3) for number in (1, 2, 3)]
    assert sum(map(Counter, parts), Counter()) == Counter(passes)
    assert max(map(len, parts)) - min(map(len, parts)) <= len(passes.programs)


def test_programs_that_were_not_run_are_left() -> None:
    """If time runs out, the sweep says how much is left in each pass."""
    passes, over = order_in_passes(Sweep(operations=("neg",)).programs()), iter((False, False, True))
    assert run_sweep(passes, is_over=lambda: next(over)).stopped
    first, *others = passes.coverage()
    assert first.num_covered == 2
    assert first.num_left == len(passes.programs[first.name]) - 2 > 0
    assert not any(each.num_covered for each in others)
