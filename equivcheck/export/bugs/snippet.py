"""What puts a bug into a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.text import block

Snippet = Callable[[Draft], None]
"""Changes a draft whose layout has been written; raises `CannotExport` where it does not fit."""


def each_gradient(draft: Draft, *lines: str) -> list[str]:
    """Lines for each parameter that has a gradient, called ``parameter``."""
    return block(f"for parameter in {draft.parameters}:", block("if parameter.grad is not None:", list(lines)))


def flagged(draft: Draft, changed: Sequence[tuple[str, ...]]) -> None:
    """Let the classes of layers be others, which have a flag ``is_wrong`` that is set on ranks."""
    pairs = list(zip(draft.form.classes, changed, strict=True))
    if all(before == after for before, after in pairs):
        raise refuse("the mutant", "no layer of the script has what it changes")
    flag = ("    is_wrong = False  # but on ranks", "")
    classes = tuple(after if after == before else (*after[:3], *flag, *after[3:]) for before, after in pairs)
    draft.form = replace(draft.form, classes=classes)
    draft.lines[LoopPosition.WRAP][:0] = ["for layer in model.modules():", "    layer.is_wrong = True"]
