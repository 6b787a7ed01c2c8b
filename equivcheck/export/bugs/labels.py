"""Losses of labels that are divided by another number, lack a part, or are of other labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.data_rows import rows_of
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import data_rank
from equivcheck.scenario import CrossEntropy, Pipeline
from equivcheck.scenario.mesh import TP
from equivcheck.training.material import IGNORED, Batch, count_labels, material

Count = Callable[[Batch], float]
"""What the labels of a microbatch count."""
Divisors = Callable[[Sequence[Batch], Count, int, int], Sequence[float]]
"""What the loss of each microbatch of a step is divided by, on one rank of so many that have rows of their own."""


def _loss(draft: Draft) -> CrossEntropy:
    loss = draft.scenario.training.loss
    if not isinstance(loss, CrossEntropy):
        raise refuse("the mutant", "it needs a loss of labels")
    if draft.scenario.layout.has(Pipeline):
        raise refuse("the mutant", "under pipeline the loss of a chunk is a function of its own, which no microbatch changes")
    return loss


def _divided(divisors: Divisors, *, weighted: bool = True) -> Snippet:
    def plant(draft: Draft) -> None:
        loss, training, ranks = _loss(draft), draft.scenario.training, draft.scenario.layout.num_data_ranks
        counted = loss if weighted else replace(loss, class_weights=False)

        def count(batch: Batch) -> float:
            return count_labels(counted, training.model.outputs, batch.targets)

        table = [[list(divisors(step, count, rank, ranks)) for rank in range(ranks)] for step in material(training).steps]
        draft.definitions.append([f"DIVISORS = {table}  # per step, rank and microbatch"])
        draft.needs_number = True
        number = "number" if len(training.data.microbatches) > 1 else "0"
        right = "" if loss.summed else " * COUNTED[step]"
        draft.add(LoopPosition.SCALE, f"loss = loss{right} / DIVISORS[step][{data_rank(draft)}][{number}]")

    return plant


def _of_rank(step: Sequence[Batch], count: Count, rank: int, ranks: int) -> Sequence[float]:
    own = sum(count(rows_of(batch, rank, ranks)) for batch in step)
    return [ranks * (own or 1.0)] * len(step)


def _of_microbatch(step: Sequence[Batch], count: Count, _rank: int, _ranks: int) -> Sequence[float]:
    return [len(step) * (count(batch) or 1.0) for batch in step]


def _of_microbatch_of_rank(step: Sequence[Batch], count: Count, rank: int, ranks: int) -> Sequence[float]:
    return [ranks * len(step) * (count(rows_of(batch, rank, ranks)) or 1.0) for batch in step]


def _of_all(step: Sequence[Batch], _count: Count, _rank: int, _ranks: int) -> Sequence[float]:
    return [float(sum(batch.targets.numel() for batch in step))] * len(step)


def _of_step(step: Sequence[Batch], count: Count, _rank: int, _ranks: int) -> Sequence[float]:
    return [sum(map(count, step))] * len(step)


def _minimised(changes: Callable[[CrossEntropy, int], dict[str, float | bool]]) -> Snippet:
    """Let ranks have another loss of the same labels, told it and how many have rows of their own."""

    def plant(draft: Draft) -> None:
        loss = _loss(draft)
        other = replace(loss, **changes(loss, draft.scenario.layout.num_data_ranks))  # type: ignore[arg-type]
        draft.trained = replace(draft.trained, loss=other)

    return plant


def _ignored_replaced(draft: Draft) -> None:
    draft.lines[LoopPosition.TAKE][:0] = [f"targets = targets.masked_fill(targets == {IGNORED}, 0)"]


def _relabelled(change: str) -> Snippet:
    """Change each tensor-parallel rank's part of each sequence of labels apart."""

    def plant(draft: Draft) -> None:
        dim, parts = 1 - draft.scenario.training.data.batch_dim, draft.scenario.layout.mesh.size(TP)
        lines = [f"for part in targets.chunk({parts}, {dim}):", f"    {change.format(dim=dim)}"]
        draft.lines[LoopPosition.TAKE][:0] = ["targets = targets.clone()", *lines]

    return plant


SNIPPETS: dict[str, Snippet] = {
    "labels_counted_by_each_rank": _divided(_of_rank),
    "labels_counted_by_microbatch": _divided(_of_microbatch),
    "labels_counted_by_microbatch_of_each_rank": _divided(_of_microbatch_of_rank),
    "ignored_labels_counted": _divided(_of_all),
    "labels_counted_without_class_weights": _divided(_of_step, weighted=False),
    "labels_not_counted": _divided(lambda step, *_: [1.0] * len(step)),
    "labels_of_all_ranks_counted_and_averaged": _divided(
        lambda step, _count, _rank, ranks: [ranks * step[0].divisor] * len(step)
    ),
    "ignored_label_replaced": _ignored_replaced,
    "labels_shifted_within_parts": _relabelled("part.copy_(part.roll(-1, {dim}))"),
    "label_lost_at_borders": _relabelled(f"part.select({{dim}}, -1).fill_({IGNORED})"),
    "z_loss_summed_over_ranks": _minimised(lambda loss, ranks: {"z_loss": ranks * loss.z_loss}),
    "z_loss_lost": _minimised(lambda _loss, _ranks: {"z_loss": 0.0}),
    "label_smoothing_lost": _minimised(lambda _loss, _ranks: {"label_smoothing": 0.0}),
    "class_weights_lost": _minimised(lambda _loss, _ranks: {"class_weights": False}),
}
"""By the name of the mutant."""
