"""`check_training(batch_splits=True)`: the same batches, split over the data ranks in other ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivcheck import BatchSplits, Outcome, UsageError, check_training, smallest
from unit.batching import steps
from unit.batching.steps import Batch, Causal, losses, step_of, summed

SPLITS = {
    "rows split over ranks",
    "rows split over ranks, the first rank padded by 3 more",
    "two microbatches on each rank",
    "one row on each rank but the first",
    "a rank without labels",
    "a rank with a microbatch without labels",
    "rows split over ranks, on 3 ranks",
}
"""The seven ways that reports are about."""


def tokens() -> Batch:
    """Tokens of which every one has a label, so that equal parts have equal counts."""
    found = steps.tokens()
    return found | {"labels": found["input_ids"].clone()}


def in_ddp(model: nn.Module, _mesh: Any) -> nn.Module:
    """Wrap in DDP. The router has no loss."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


def over_ranks(number: torch.Tensor) -> torch.Tensor:
    """Sum over ranks."""
    total = number.double()
    dist.all_reduce(total)
    return total


def of_all_ranks(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Mean over the tokens on all ranks, for gradients that are averaged."""
    return losses(model, batch).sum() / over_ranks(summed(steps.count, batches)) * dist.get_world_size()


def of_own_rank(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Mistake: mean over the rank's own tokens."""
    return losses(model, batch).sum() / summed(steps.count, batches).clamp(min=1)


def of_one_at_least(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Mistake: a rank without labels counts as one token."""
    total = over_ranks(summed(steps.count, batches).clamp(min=1))
    return losses(model, batch).sum() / total * dist.get_world_size()


def of_positions(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Mistake: mean over positions, padding included."""
    return losses(model, batch).sum() / over_ranks(summed(steps.num_positions, batches)) * dist.get_world_size()


def _of_one_batch(step: Any, model: Any, batch: Batch, optimizer: Any, loss: Any) -> Any:
    return step(model, [batch], optimizer, loss)


def arguments(rank_step: Any = of_all_ranks, **given: Any) -> dict[str, Any]:
    """Arguments for a training of lists of microbatches."""
    usual = {
        "model": Causal,
        "step": steps.token_mean,
        "rank_step": step_of(rank_step),
        "parallelize": in_ddp,
        "mesh": {"dp": 2},
        "batches": [[tokens()]],
        "loss": nn.functional.cross_entropy,
        "optimizer": sgd,
        "batch_splits": True,
    }
    return usual | given


def test_a_right_step_agrees_in_all_splits() -> None:
    """Seven at least, and the verdict names them."""
    verdict = check_training(**arguments())
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    (note,) = [note for note in verdict.notes if note.startswith("split in other ways, the batches give the same: ")]
    assert set(note.partition(": ")[2].split("; ")) >= SPLITS


@pytest.mark.parametrize(
    ("rank_step", "split"),
    [
        (of_own_rank, "rows split over ranks"),
        (of_one_at_least, "a rank without labels"),
        (of_positions, "rows split over ranks"),
    ],
)
def test_a_step_that_is_right_for_equal_parts_only_diverges(rank_step: Any, split: str) -> None:
    """The verdict names the split. Without splits, equal parts agree."""
    step = step_of(lambda model, batch, batches: losses(model, batch).sum() / summed(steps.num_positions, batches))
    given = arguments(rank_step, **({"step": step} if rank_step is of_positions else {}))
    assert check_training(**given | {"batch_splits": False}).outcome is Outcome.EQUIVALENT
    verdict = check_training(**given)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.split == split
    assert f"split: {split}" in str(verdict)


def test_batches_without_lists_have_one_microbatch() -> None:
    """The user's step takes one batch, so it never gets two."""
    given = arguments(batches=[tokens()])
    for name in ("step", "rank_step"):
        given[name] = partial(_of_one_batch, given[name])
    verdict = check_training(**given)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert "microbatch" not in verdict.notes[-1]


def test_smallest_shrinks_a_split() -> None:
    """Fewer steps and rows, and only the split that differs."""
    batches = [[tokens()], [tokens()]]
    found = smallest(**arguments(of_one_at_least, batches=batches))
    assert found.verdict.split == "a rank without labels"
    assert found.arguments["batch_splits"] == BatchSplits(only=("a rank without labels",))
    assert len(found.arguments["batches"]) == 1
    assert len(found.arguments["batches"][0][0]["input_ids"]) < steps.ROWS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": None, "rank_step": None, "batches": [(torch.ones(2, 2), torch.ones(2, 2))]}, "batch_splits without step"),
        ({"shard": lambda batch, _: batch}, "batch_splits together with shard"),
        ({"mesh": {"dp": 1}}, "the mesh has one data rank"),
        ({"batch_splits": BatchSplits(only=("thirds",))}, "batch_splits 'thirds' is not valid: these batches have no such split"),
        ({"batches": [[{"loss": 1.0}]]}, "none of its tensors has a dim for rows"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, Any], words: str) -> None:
    """With the remedy."""
    with pytest.raises(UsageError) as raised:
        check_training(**arguments(**given))
    text = str(raised.value)
    assert text.startswith("check_training: ")
    assert words in text
    assert "Expected " in text
    assert "\n" not in text
