"""Ranks that take other rows than their own."""

from __future__ import annotations

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import data_rank
from equivcheck.scenario import SPMD


def _share(index: str) -> Snippet:
    def take(draft: Draft) -> None:
        own, count = f"[{data_rank(draft)}]", draft.scenario.layout.num_data_ranks
        if draft.scenario.layout.has(SPMD):
            raise refuse("the mutant", "under spmd rows are distributed by one call")
        other = f"[{index.format(rank=data_rank(draft), last=count - 2)}]"
        draft.lines[LoopPosition.TAKE] = [line.replace(own, other) for line in draft.lines[LoopPosition.TAKE]]

    return take


def _shuffled_apart(draft: Draft) -> None:
    rank, dim = data_rank(draft), draft.scenario.training.data.batch_dim
    lines = [f"inputs, targets = (values.roll({rank}, {dim}) for values in (inputs, targets))  # each rank otherwise"]
    if "masks" in draft.form.extras:
        lines.append(f"masks = [mask.roll({rank}, 0) for mask in masks]")
    draft.lines[LoopPosition.TAKE][:0] = lines


def _whole_batch_on_every_rank(draft: Draft) -> None:
    def whole(line: str) -> str:
        for name in ("values", "mask"):
            line = line.replace(f"distribute_tensor({name}, mesh, ", f"DTensor.from_local({name}, mesh, ")
        return line

    draft.lines[LoopPosition.TAKE] = [whole(line) for line in draft.lines[LoopPosition.TAKE]]


SNIPPETS: dict[str, Snippet] = {
    "same_rows_everywhere": _share("0"),
    "last_rows_lost": _share("min({rank}, {last})"),
    "shuffled_apart": _shuffled_apart,
    "whole_batch_on_every_rank": _whole_batch_on_every_rank,
}
"""By the name of the mutant."""
