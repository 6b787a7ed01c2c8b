"""Which files of `examples/` are recipes."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "equivcheck.Matrix(" in path.read_text("utf-8"))
"""Their names."""
