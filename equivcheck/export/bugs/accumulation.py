"""Microbatches that count for more or less than they should."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.script.draft import Draft
from equivcheck.layouts.base.script.mesh import data_rank
from equivcheck.scenario import Data


def _weighted(weight: Callable[[Data], str]) -> Snippet:
    def plant(draft: Draft) -> None:
        draft.weight, draft.needs_number = weight(draft.scenario.training.data), True

    return plant


def _number_of(data: Data) -> int:
    return len(data.microbatches)


def _summed(data: Data) -> str:
    if len(set(data.microbatches)) == 1:
        return f"{_number_of(data)}.0"
    return f"{data.batch} / {data.microbatches}[number]"


def _lost_on_last_rank(draft: Draft) -> None:
    last, ranks = len(draft.scenario.training.data.microbatches) - 1, draft.scenario.layout.num_data_ranks
    draft.needs_number = True
    draft.weight = f"float(number < {last} or {data_rank(draft)} < {ranks - 1})"


def _sum_averaged_over_ranks(draft: Draft) -> None:
    draft.loss_scale = 1


SNIPPETS: dict[str, Snippet] = {
    "microbatches_summed": _weighted(_summed),
    "microbatches_averaged_twice": _weighted(lambda data: f"1 / {_number_of(data)}"),
    "rescaled_each_microbatch": _weighted(lambda data: f"{_number_of(data)}.0 ** (number - {_number_of(data) - 1})"),
    "only_last_microbatch": _weighted(lambda data: f"float(number == {_number_of(data) - 1})"),
    "only_first_microbatch": _weighted(lambda _data: "float(number == 0)"),
    "last_microbatch_lost": _weighted(lambda data: f"float(number < {_number_of(data) - 1})"),
    "last_microbatch_lost_on_one_rank": _lost_on_last_rank,
    "mean_of_means": _weighted(lambda data: f"{_summed(data)} / {_number_of(data)}"),
    "sum_averaged_over_ranks": _sum_averaged_over_ranks,
}
"""By the name of the mutant."""
