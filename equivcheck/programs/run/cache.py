"""Caches single-device runs for programs that differ only in placements, because a sweep runs such programs in sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from equivcheck.oracle.reference.reference import Reference
from equivcheck.programs.nouns.placement import REPLICATE
from equivcheck.programs.nouns.program import Constant, Leaf, TensorProgram
from equivcheck.programs.run.one_device import ProgramPlan, plan_of
from equivcheck.programs.run.reference import reference_of

_NUM_KEPT = 16
"""Maximum number of entries in each cache. A sweep reuses the last program, a pair sweep the last few."""


def cached_plan(program: TensorProgram) -> ProgramPlan:
    """Return the same as `plan_of`, from a cache if the program has already run on one device, perhaps with other placements."""
    return replace(_plan(with_replicated_leaves(program)), program=program)


def cached_reference(plan: ProgramPlan, refused: frozenset[int], num_copies: int) -> Reference:
    """Return the same as `reference_of`, from a cache if the program has already run, perhaps with other placements."""
    return _reference(
        with_replicated_leaves(plan.program), (plan.every_gradient, plan.fills_gradients, plan.only_sinks), refused, num_copies
    )


def with_replicated_leaves(program: TensorProgram) -> TensorProgram:
    """Return the program with replicated leaves and constants, as a cache key. One device ignores placements."""
    whole = (REPLICATE,) * len(program.mesh)
    statements = [replace(each, placements=whole) if isinstance(each, (Leaf, Constant)) else each for each in program.statements]
    return replace(program, statements=tuple(statements))


@lru_cache(maxsize=_NUM_KEPT)
def _plan(program: TensorProgram) -> ProgramPlan:
    return plan_of(program)


@lru_cache(maxsize=_NUM_KEPT)
def _reference(program: TensorProgram, compared: tuple[bool, bool, bool], refused: frozenset[int], num_copies: int) -> Reference:
    every, fills, only_sinks = compared
    plan = replace(_plan(program), every_gradient=every, fills_gradients=fills, only_sinks=only_sinks)
    return reference_of(plan, refused, num_copies)
