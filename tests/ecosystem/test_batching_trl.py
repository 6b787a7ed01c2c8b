"""TRL's losses over the same examples in other batches. Some differ by definition, because they are means over a microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecosystem import torchvision_operators  # noqa: F401 - before transformers
from ecosystem.test_batching import IGNORED, LENGTH, ROWS, VOCABULARY, Batch, llama, tokens
from equivcheck import Outcome, check_batching

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
gkd = pytest.importorskip("trl.experimental.gkd")
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_PROMPT = 2
PER_MICROBATCH = "of each microbatch, then the mean over microbatches"


def tokenizer() -> Any:
    """Words without meaning."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(VOCABULARY)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1", unk_token="w0"
    )


def arguments(folder: Path, num_microbatches: int = 1) -> dict[str, Any]:
    """Arguments of every TRL configuration."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "bf16": False,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": num_microbatches,
    }


def train(trainer: Any, model: nn.Module, batches: list[Batch], optimizer: Any) -> None:
    """The Trainer's steps over microbatches, and an update."""
    optimizer.zero_grad()
    trainer.current_gradient_accumulation_steps = len(batches)
    number = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    for batch in batches:
        trainer.training_step(model, dict(batch), number)
    optimizer.step()


def test_the_sft_trainer_is_right(tmp_path: Path) -> None:
    """It divides by the labels in all microbatches."""

    def step(model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
        config = trl.SFTConfig(**arguments(tmp_path, len(batches)), dataset_kwargs={"skip_prepare_dataset": True})
        data = datasets.Dataset.from_dict({"input_ids": [[3]], "labels": [[3]]})
        train(trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer()), model, batches, optimizer)

    verdict = check_batching(model=llama, step=step, batch=tokens(), normaliser="token")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def completions() -> Batch:
    """Rows with a prompt of two tokens and an answer, with its advantage."""
    mask = (torch.arange(LENGTH) < torch.tensor([[7], [5], [10], [9]])).long()
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) * mask,
        "attention_mask": mask,
        "completion_mask": mask * (torch.arange(LENGTH) >= NUM_PROMPT).long(),
        "advantages": torch.randn(ROWS, generator=generator),
    }


class GRPOStep:
    """GRPOTrainer's loss. `num_items_in_batch` counts answers in all microbatches, as the Trainer's generation does."""

    def __init__(self, folder: Path, loss_type: str) -> None:
        self.folder, self.loss_type = folder, loss_type

    def __call__(self, model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
        """Train one step."""
        optimizer.zero_grad()
        config = trl.GRPOConfig(
            **arguments(self.folder, len(batches)),
            loss_type=self.loss_type,
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=LENGTH,
        )
        data = datasets.Dataset.from_dict({"prompt": ["w3"]})
        trainer = trl.GRPOTrainer(model, lambda **_: [0.0], config, train_dataset=data, processing_class=tokenizer())
        trainer.current_gradient_accumulation_steps = len(batches)
        number = sum(batch["completion_mask"].sum() for batch in batches)
        for batch in batches:
            parts = {
                "prompt_ids": batch["input_ids"][:, :NUM_PROMPT],
                "prompt_mask": batch["attention_mask"][:, :NUM_PROMPT],
                "completion_ids": batch["input_ids"][:, NUM_PROMPT:],
                "completion_mask": batch["completion_mask"][:, NUM_PROMPT:],
                "advantages": batch["advantages"],
                "num_items_in_batch": number,
            }
            trainer._compute_loss(model, parts).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("loss_type", "declared"),
    [
        ("dapo", {"normaliser": "token"}),
        ("cispo", {"normaliser": "token"}),
        ("grpo", {"normaliser": "sequence", "microbatches": "even"}),
        ("sapo", {"normaliser": "sequence", "microbatches": "even"}),
        ("dr_grpo", {"microbatches": "even"}),
        ("luspo", {"microbatches": "even"}),
    ],
)
def test_losses_of_grpo_are_right(tmp_path: Path, loss_type: str, declared: dict[str, Any]) -> None:
    """Losses that average each microbatch's rows need equally many rows in each."""
    verdict = check_batching(model=llama, step=GRPOStep(tmp_path, loss_type), batch=completions(), **declared)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


@pytest.mark.parametrize(
    ("loss_type", "declared", "cause"),
    [
        ("grpo", {"normaliser": "sequence"}, f"mean over the examples {PER_MICROBATCH}"),
        ("bnpo", {"microbatches": "even"}, f"sum over the examples, divided by the counted tokens, {PER_MICROBATCH}"),
        ("dr_grpo", {}, f"mean over the examples {PER_MICROBATCH}"),
    ],
)
def test_losses_of_grpo_that_differ_by_definition(tmp_path: Path, loss_type: str, declared: dict[str, Any], cause: str) -> None:
    """BNPO averages the tokens of a microbatch, and the others its rows. TRL documents this.

    The completion mask is the attention mask, too, so an example's loss is no sum over its tokens.
    """
    verdict = check_batching(model=llama, step=GRPOStep(tmp_path, loss_type), batch=completions(), **declared)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause.startswith(cause)


def pairs() -> list[dict[str, Any]]:
    """Prompts with a chosen and a rejected answer, with a reference model's log-probabilities."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number, (chosen, rejected) in enumerate([(5, 3), (2, 6), (7, 4), (3, 3)]):
        draw = [
            torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (NUM_PROMPT, chosen, rejected)
        ]
        prompt, first, second = draw
        reference = {"ref_chosen_logps": -3.0 * chosen - number, "ref_rejected_logps": -3.0 * rejected}
        found.append({"prompt_ids": prompt, "chosen_ids": first, "rejected_ids": second, **reference})
    return found


class DPOStep:
    """DPOTrainer's step."""

    def __init__(self, folder: Path, loss_type: str) -> None:
        self.folder, self.loss_type = folder, loss_type

    def __call__(self, model: Any, batches: list[Any], optimizer: Any, _loss: Any) -> None:
        """Train one step."""
        config = trl.DPOConfig(**arguments(self.folder, len(batches)), loss_type=[self.loss_type], label_smoothing=0.1)
        data = datasets.Dataset.from_list([{"prompt": "w3", "chosen": "w4", "rejected": "w5"}])
        trainer = trl.DPOTrainer(model, llama(), config, train_dataset=data, processing_class=tokenizer())
        trainer.precompute_ref_logps = True
        train(trainer, model, batches, optimizer)


def collated(examples: list[dict[str, Any]]) -> Batch:
    """A batch as TRL makes it: all chosen answers, then all rejected ones."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    batch: Batch = DataCollatorForPreference(pad_token_id=0)(examples)
    return batch


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "exo_pair", "robust", "apo_zero", "sppo_hard"])
def test_losses_of_dpo_are_right_for_even_microbatches(tmp_path: Path, loss_type: str) -> None:
    """They are means over the pairs of a microbatch, averaged by the Trainer."""
    verdict = check_batching(
        model=llama,
        step=DPOStep(tmp_path, loss_type),
        batch=collated(pairs()),
        examples=lambda _: pairs(),
        collate=collated,
        normaliser="sequence",
        microbatches="even",
    )
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_losses_of_dpo_differ_by_definition_for_uneven_microbatches(tmp_path: Path) -> None:
    """A pair in a small microbatch weighs more."""
    verdict = check_batching(
        model=llama,
        step=DPOStep(tmp_path, "sigmoid"),
        batch=collated(pairs()),
        examples=lambda _: pairs(),
        collate=collated,
        normaliser="sequence",
    )
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert PER_MICROBATCH in verdict.cause


class GKDStep:
    """GKDTrainer's step. With `lmbda` 1 the student generates the answers, without random numbers."""

    def __init__(self, folder: Path, lmbda: float) -> None:
        self.folder, self.lmbda = folder, lmbda

    def __call__(self, model: Any, batches: list[Batch], optimizer: Any, _loss: Any) -> None:
        """Train one step."""
        config = gkd.GKDConfig(**arguments(self.folder, len(batches)), lmbda=self.lmbda, max_new_tokens=4)
        data = datasets.Dataset.from_dict({"messages": [[{"role": "user", "content": "w3"}]]})
        torch.manual_seed(9)
        teacher = llama().to(next(model.parameters()).dtype)
        trainer = gkd.GKDTrainer(model, teacher, config, train_dataset=data, processing_class=tokenizer())
        trainer.generation_config.do_sample = False
        prompts = [
            {"prompts": batch["input_ids"][:, :NUM_PROMPT], "prompt_attention_mask": batch["attention_mask"][:, :NUM_PROMPT]}
            for batch in batches
        ]
        train(trainer, model, [batch | prompt for batch, prompt in zip(batches, prompts, strict=True)], optimizer)


def answers() -> Batch:
    """Prompts of two tokens, with answers as labels."""
    found = completions()
    labels = found["input_ids"].masked_fill(found["completion_mask"] == 0, IGNORED)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}


def test_the_gkd_trainer_is_right_for_answers_from_the_dataset(tmp_path: Path) -> None:
    """It divides by the labels in all microbatches."""
    verdict = check_batching(model=llama, step=GKDStep(tmp_path, 0.0), batch=answers(), normaliser="token")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_the_gkd_trainer_divides_generated_answers_by_labels_of_the_dataset(tmp_path: Path) -> None:
    """A mistake in TRL 1.16: labels are counted before the student generates other answers."""
    verdict = check_batching(model=llama, step=GKDStep(tmp_path, 1.0), batch=answers(), normaliser="token")
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.reason == "the whole batch is not the declared mean over the counted tokens of all microbatches"
