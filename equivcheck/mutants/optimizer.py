"""Optimizer and schedule, wrong on purpose."""

from __future__ import annotations

from equivcheck.mutants.hyperparameters import HYPERPARAMETERS
from equivcheck.mutants.mutant import Mutant
from equivcheck.mutants.schedules import SCHEDULES
from equivcheck.mutants.states import STATES

MUTANTS: tuple[Mutant, ...] = (*HYPERPARAMETERS, *SCHEDULES, *STATES)
"""Every mutant of the family."""
