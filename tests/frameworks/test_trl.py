"""TRL's trainers on two ranks, by the version that is installed."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

with contextlib.suppress(ModuleNotFoundError):
    from ecosystem import torchvision_operators  # noqa: F401 - before transformers

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.trl import TRL
from equivcheck.user.trainers.trl_losses import dpo_loss, grpo_loss, reward_loss, sft_loss
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

ROWS, PROMPT, LENGTH, VOCABULARY = 4, 3, 8, 32
LOSSES: dict[str, Any] = {"SFT": sft_loss, "DPO": dpo_loss, "Reward": reward_loss, "GRPO": grpo_loss}


def model(kind: str) -> nn.Module:
    """Two tiny layers of Llama."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, use_cache=False, pad_token_id=0, num_labels=1)
    return (transformers.LlamaForSequenceClassification if kind == "Reward" else transformers.LlamaForCausalLM)(config)


class Drawn:
    """Batches of tokens. Completions have unequal lengths."""

    def __init__(self, *, is_even: bool = False) -> None:
        self.is_even = is_even
        self.generator = torch.Generator().manual_seed(0)

    def tokens(self, length: int = LENGTH) -> torch.Tensor:
        """No padding."""
        return torch.randint(4, VOCABULARY, (ROWS, length), generator=self.generator)

    def mask(self, length: int) -> torch.Tensor:
        """At least one position in each row."""
        if self.is_even:
            return torch.ones(ROWS, length).long()
        return (torch.arange(length) < torch.randint(1, length + 1, (ROWS, 1), generator=self.generator)).long()

    def answer(self, name: str) -> dict[str, torch.Tensor]:
        """Half of a pair: a prompt, and a completion of another length."""
        is_given, is_answer = torch.ones(ROWS, PROMPT).long(), self.mask(LENGTH - PROMPT)
        attention = torch.cat([is_given, is_answer], 1)
        keys = {"input_ids": self.tokens() * attention, "attention_mask": attention}
        return {f"{name}_{key}": value for key, value in keys.items()} | {
            f"{name}_completion_mask": attention - torch.cat([is_given, 0 * is_answer], 1)
        }

    def batch(self, kind: str) -> Any:
        """A microbatch for a trainer."""
        if kind == "SFT":
            tokens = self.tokens()
            labels = tokens.masked_fill(self.mask(LENGTH) == 0, -100)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}, None
        if kind == "GRPO":
            prompt = {"prompt_ids": self.tokens(PROMPT), "prompt_mask": torch.ones(ROWS, PROMPT).long()}
            completion = {"completion_ids": self.tokens(), "completion_mask": self.mask(LENGTH)}
            return prompt | completion | {"advantages": torch.randn(ROWS, generator=self.generator)}, None
        pair = self.answer("chosen") | self.answer("rejected")
        if kind == "Reward":
            return {key: value for key, value in pair.items() if "completion" not in key}, None
        reference = {f"ref_{name}_logps": torch.randn(ROWS, generator=self.generator) - 9 for name in ("chosen", "rejected")}
        return pair | reference, None


def checked(kind: Any, num_microbatches: int = 3, limit: float = 0.0, **options: Any) -> UserVerdict:
    """Two updates on two ranks."""
    drawn = Drawn(is_even=options.pop("is_even", False))
    arguments = options.pop("arguments", {})
    given: dict[str, Any] = {
        "model": partial(model, kind),
        "trainer": TRL(kind=kind, arguments={"max_grad_norm": limit, **arguments}),
        "mesh": {"dp": 2},
        "batches": [[drawn.batch(kind) for _ in range(num_microbatches)] for _ in range(2)],
        "loss": LOSSES.get(kind, sft_loss),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "dtype": torch.float32,
        "world": "gloo",
    }
    return check_training(**given | options)


@pytest.mark.parametrize(("num_microbatches", "limit"), [(1, 0.0), (3, 0.0), (3, 0.1)])
@pytest.mark.parametrize("kind", LOSSES)
def test_trainers_are_equivalent(kind: str, num_microbatches: int, limit: float) -> None:
    """With accumulation and clipping."""
    verdict = checked(kind, num_microbatches, limit)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


def test_grpo_with_means_over_rows() -> None:
    """Its first loss."""
    verdict = checked("GRPO", arguments={"loss_type": "grpo"}, loss=partial(grpo_loss, mean_over="rows"))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_labels_that_count_by_rank() -> None:
    """A mistake in the configuration: ranks with fewer labels weigh them more."""
    verdict = checked("SFT", arguments={"average_tokens_across_devices": False})
    assert verdict.divergence is not None, verdict
    assert verdict.divergence.phase is Phase.LOSS


class MeanOfMicrobatch(trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """A mistake: the trainer does not divide by the number of microbatches if it passes the number of labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Average over this microbatch's labels only."""
        return super().compute_loss(model, inputs, return_outputs, None)


def test_a_subclass_that_ignores_the_number_of_labels() -> None:
    """Its gradient is a sum."""
    verdict = checked("SFT", trainer=TRL(kind="SFT", trainer=MeanOfMicrobatch, arguments={"max_grad_norm": 0.0}), is_even=True)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause == "gradient and loss are the sum over the 3 microbatches, not the mean", verdict


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("SFT", {"world": "sim"}, "trainer TRL is not valid: it needs processes"),
        ("SFT", {"arguments": {"bf16": True}}, "trainer TRL is not valid: its bf16 or fp16 rounds at other places"),
        ("KTO", {}, "trainer TRL with kind 'KTO' is not valid: there is no adapter for it"),
    ],
)
def test_bad_input_is_one_line(kind: str, options: dict[str, Any], words: str) -> None:
    """It names the argument and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked(kind, **options)
    assert str(raised.value).startswith(f"check_training: {words}")
