"""The smallest scenario for each mutant."""

from __future__ import annotations

from mutants.minimums import batches, context_parallel, experts, gradients, layers, plain_tensors, token_layers, tokens

MINIMUMS = {
    name: scenario
    for family in (gradients, layers, tokens, token_layers, plain_tensors, experts, context_parallel, batches)
    for name, scenario in family.MINIMUMS.items()
}
"""Scenarios by mutant."""
