"""Copies that stages of several ranks have of a weight, and that do not stay one weight."""

from __future__ import annotations

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.text import block
from equivcheck.layouts.parallelisms.pipeline.export_copies import SUM_GRADIENTS


def _not_summed(draft: Draft) -> None:
    draft.lines[LoopPosition.BEFORE_READING] = []


def _summed_each_microbatch(draft: Draft) -> None:
    draft.needs_number = True
    draft.add(LoopPosition.TAKE, *block("if number > 0:", SUM_GRADIENTS))


def _in_norm(draft: Draft) -> None:
    draft.clip_norm = "clip_across_stages(list(model.parameters()), list(model.parameters()))"


SNIPPETS: dict[str, Snippet] = {
    "pipeline_copies_not_summed": _not_summed,
    "pipeline_copies_summed_each_microbatch": _summed_each_microbatch,
    "pipeline_copies_in_norm": _in_norm,
}
"""By the name of the mutant."""
