"""The smallest scenario that shows each mutant."""

from __future__ import annotations

from mutants.minimums import gradients, layers, plain_tensors, token_layers, tokens

MINIMUMS = gradients.MINIMUMS | layers.MINIMUMS | tokens.MINIMUMS | token_layers.MINIMUMS | plain_tensors.MINIMUMS
"""By the name of the mutant."""
