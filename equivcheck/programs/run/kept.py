"""What one device computes, kept for programs that differ in placements alone, as those of a sweep do one after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from equivcheck.oracle.reference.reference import Reference
from equivcheck.programs.nouns.placement import REPLICATE
from equivcheck.programs.nouns.program import TensorProgram
from equivcheck.programs.nouns.statements import Constant, Leaf
from equivcheck.programs.run.one_device import Plan, plan_of
from equivcheck.programs.run.reference import reference_of

_NUM_KEPT = 16
"""Programs, and references of each kind: a sweep needs the last, and one of pairs those that it tries in turn."""


def kept_plan(program: TensorProgram) -> Plan:
    """`plan_of` a program."""
    return replace(_plan(unplaced(program)), program=program)


def kept_reference(plan: Plan, refused: frozenset[int], num_copies: int) -> Reference:
    """`reference_of` a plan."""
    return _reference(unplaced(plan.program), (plan.every_gradient, plan.fills_gradients, plan.only_sinks), refused, num_copies)


def unplaced(program: TensorProgram) -> TensorProgram:
    """The program with all that it begins with replicated: one device does not look at placements."""
    whole = (REPLICATE,) * len(program.mesh)
    statements = [replace(each, placements=whole) if isinstance(each, (Leaf, Constant)) else each for each in program.statements]
    return replace(program, statements=tuple(statements))


@lru_cache(maxsize=_NUM_KEPT)
def _plan(program: TensorProgram) -> Plan:
    return plan_of(program)


@lru_cache(maxsize=_NUM_KEPT)
def _reference(program: TensorProgram, compared: tuple[bool, bool, bool], refused: frozenset[int], num_copies: int) -> Reference:
    every, fills, only_sinks = compared
    plan = replace(_plan(program), every_gradient=every, fills_gradients=fills, only_sinks=only_sinks)
    return reference_of(plan, refused, num_copies)
