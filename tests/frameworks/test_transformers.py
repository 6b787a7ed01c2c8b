"""transformers' trainer on two ranks, by the version that is installed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

with contextlib.suppress(ModuleNotFoundError):
    from ecosystem import torchvision_operators  # noqa: F401 - before transformers

from equivcheck import Outcome, check_training
from equivcheck.user.trainers.transformers import HFTrainer
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase

transformers = pytest.importorskip("transformers")


def model() -> nn.Module:
    """Two tiny layers of Llama."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))


def batches(num_microbatches: int, *, is_uneven: bool) -> list[Any]:
    """Two updates. If uneven, rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(2 * num_microbatches):
        tokens = torch.randint(0, 32, (4, 8), generator=generator)
        labels = tokens.clone()
        for row in range(4) if is_uneven else ():
            labels[row, : (3 * row + 2 * number) % 7] = -100
        made.append(({"input_ids": tokens, "labels": labels}, None))
    return [made[:num_microbatches], made[num_microbatches:]]


def checked(num_microbatches: int, limit: float, *, is_uneven: bool, averages: bool = True) -> UserVerdict:
    """Two updates on two ranks."""
    return check_training(
        model=model,
        trainer=HFTrainer(arguments={"max_grad_norm": limit, "average_tokens_across_devices": averages}),
        mesh={"dp": 2},
        batches=batches(num_microbatches, is_uneven=is_uneven),
        loss=lambda outputs, _: outputs.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        dtype=torch.float32,
        world="gloo",
    )


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize(("num_microbatches", "limit"), [(1, 0.0), (3, 0.0), (3, 0.1)])
def test_ddp_is_equivalent(num_microbatches: int, limit: float, is_uneven: bool) -> None:
    """All labels of an update count equally, on any rank and in any microbatch."""
    verdict = checked(num_microbatches, limit, is_uneven=is_uneven)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_without_the_average_over_ranks_labels_count_by_rank(num_microbatches: int) -> None:
    """Ranks with fewer labels then weigh them more. It does not matter if all ranks have equally many."""
    verdict = checked(num_microbatches, 0.0, is_uneven=True, averages=False)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert verdict.divergence.phase is Phase.LOSS
    assert checked(num_microbatches, 0.0, is_uneven=False, averages=False).outcome is Outcome.EQUIVALENT
