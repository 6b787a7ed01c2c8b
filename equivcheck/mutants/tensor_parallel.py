"""Tensor and sequence parallelism, propagation and pipelines, wrong on purpose."""

from __future__ import annotations

from equivcheck.mutants.mutant import Mutant
from equivcheck.mutants.pipelines import PIPELINES
from equivcheck.mutants.propagation import PROPAGATION
from equivcheck.mutants.shards import SHARDS
from equivcheck.mutants.split_layers import SPLIT_LAYERS

MUTANTS: tuple[Mutant, ...] = (*SPLIT_LAYERS, *SHARDS, *PROPAGATION, *PIPELINES)
"""Every mutant of the family."""
