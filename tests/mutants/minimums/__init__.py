"""The smallest scenario that shows each mutant."""

from __future__ import annotations

from mutants.minimums import gradients, layers

MINIMUMS = gradients.MINIMUMS | layers.MINIMUMS
"""By the name of the mutant."""
