"""Updates that run otherwise, and ranks that go another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.script.draft import Draft, LoopPosition


def _rate_scaled_by_ranks(draft: Draft) -> None:
    training, ranks = draft.trained, draft.scenario.layout.mesh.num_ranks
    draft.trained = replace(training, optimizer=replace(training.optimizer, lr=ranks * training.optimizer.lr))


def _schedule_more_often(times: Callable[[Draft], int]) -> Snippet:
    def step(draft: Draft) -> None:
        if times(draft) > 1:
            draft.add(LoopPosition.AFTER_UPDATE, f"for _ in range({times(draft) - 1}):", "    schedule.step()")

    return step


def _schedule_stuck(draft: Draft) -> None:
    draft.conditions["schedule.step()"] = "not parallel"


def _rank_skips_update(draft: Draft) -> None:
    draft.conditions["optimizer.step()"] = "not parallel or dist.get_rank() != 1"


def _rank_raises(draft: Draft) -> None:
    draft.add(LoopPosition.BEFORE_READING, "if dist.get_rank() == 1:", '    raise RuntimeError("rank 1 fails on purpose")')


def _rank_reduces_once_more(draft: Draft) -> None:
    draft.add(LoopPosition.BEFORE_READING, "if dist.get_rank() == 1:", "    dist.all_reduce(torch.zeros(1))  # nobody else does")


def _rank_skips_reduction(draft: Draft) -> None:
    draft.need("contextlib", "nullcontext")
    last = len(draft.scenario.training.data.microbatches) - 1
    skips = f"(number < {last} or dist.get_rank() == 1)" if draft.context else "dist.get_rank() == 1"
    draft.context = f"module.no_sync() if parallel and {skips} else nullcontext()"


SNIPPETS: dict[str, Snippet] = {
    "rate_scaled_by_ranks": _rate_scaled_by_ranks,
    "schedule_stepped_each_rank": _schedule_more_often(lambda draft: draft.scenario.layout.mesh.num_ranks),
    "schedule_stepped_each_microbatch": _schedule_more_often(lambda draft: len(draft.scenario.training.data.microbatches)),
    "schedule_stuck": _schedule_stuck,
    "rank_skips_update": _rank_skips_update,
    "rank_raises": _rank_raises,
    "rank_reduces_once_more": _rank_reduces_once_more,
    "rank_skips_reduction": _rank_skips_reduction,
}
"""By the name of the mutant."""
