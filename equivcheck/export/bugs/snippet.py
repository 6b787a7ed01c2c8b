"""What puts a bug into a draft."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.layouts.script.draft import Draft
from equivcheck.layouts.script.text import block

Snippet = Callable[[Draft], None]
"""Changes a draft whose layout has been written; raises `CannotExport` where it does not fit."""


def each_gradient(draft: Draft, *lines: str) -> list[str]:
    """Lines for each parameter that has a gradient, called ``parameter``."""
    return block(f"for parameter in {draft.parameters}:", block("if parameter.grad is not None:", list(lines)))
