"""Steps of transformers and TRL over the same examples in other batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecosystem import torchvision_operators  # noqa: F401 - before transformers
from equivcheck import Outcome, check_batching

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, ROWS, LENGTH, IGNORED = 23, 4, 10, -100
Batch = dict[str, Any]


def tokens() -> Batch:
    """Rows of tokens with labels, some ignored."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :3], labels[2, 0] = IGNORED, IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def llama() -> nn.Module:
    """A tiny Llama."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    """A tiny Mixtral with a router loss."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        max_position_embeddings=64,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


def count(batch: Batch) -> int:
    """Labels that count."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def step(model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
    """The model's own loss, with the number of counted labels in all microbatches."""
    optimizer.zero_grad()
    number = sum(map(count, batches))
    for batch in batches:
        model(**batch, num_items_in_batch=number, use_cache=False).loss.backward()
    optimizer.step()


def step_of_means(model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
    """The model's own loss, without the number."""
    optimizer.zero_grad()
    for batch in batches:
        (model(**batch, use_cache=False).loss / len(batches)).backward()
    optimizer.step()


class TrainerStep:
    """The step of transformers' Trainer, with gradient accumulation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
        """Train one step."""
        optimizer.zero_grad()
        arguments = transformers.TrainingArguments(
            output_dir=str(self.folder), use_cpu=True, report_to=[], gradient_accumulation_steps=len(batches)
        )
        trainer = transformers.Trainer(model=model, args=arguments)
        trainer.current_gradient_accumulation_steps = len(batches)
        number = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
        for batch in batches:
            trainer.training_step(model, dict(batch), number)
        optimizer.step()


def lists(examples: list[Batch]) -> list[dict[str, list[int]]]:
    """Examples as collators of datasets get them."""
    return [{name: value.tolist() for name, value in example.items()} for example in examples]


def flattened(examples: list[Batch]) -> Batch:
    """One row by transformers' collator, with positions."""
    batch: Batch = transformers.DataCollatorWithFlattening()(lists(examples))
    return batch


def padding_free(examples: list[Batch]) -> Batch:
    """One row by TRL's collator."""
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    batch: Batch = dict(sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(lists(examples)))
    return batch


@pytest.mark.parametrize("packing", [None, "position_ids", flattened, padding_free])
def test_a_mean_over_all_counted_labels_is_right(packing: Any) -> None:
    """Also packed, by positions or by the libraries' collators."""
    verdict = check_batching(model=llama, step=step, batch=tokens(), normaliser="token", packing=packing)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_a_mean_of_the_models_losses_is_wrong() -> None:
    """Tokens in short microbatches count more, as in transformers before its number of items."""
    verdict = check_batching(model=llama, step=step_of_means, batch=tokens(), normaliser="token")
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause.startswith("mean over the counted tokens of each microbatch, then the mean over microbatches")


def test_the_step_of_the_trainer_is_right(tmp_path: Path) -> None:
    """It counts labels in all microbatches."""
    verdict = check_batching(model=llama, step=TrainerStep(tmp_path), batch=tokens(), normaliser="token")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_the_trainer_adds_a_router_loss_for_each_microbatch(tmp_path: Path) -> None:
    """A mistake in transformers 5.24: the loss of all microbatches is not divided, but the router loss should be."""
    verdict = check_batching(
        model=mixtral, step=TrainerStep(tmp_path), batch=tokens(), normaliser="token", microbatch_loss=("router",)
    )
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause == "each microbatch adds a loss term that is not divided by the number of microbatches"
