"""Precision, recomputation and ties, wrong on purpose."""

from __future__ import annotations

from equivcheck.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
"""Every mutant of the family."""
