"""Adapter for TRL's trainers: SFT, DPO, GRPO and rewards, under DDP. Tried with TRL 1.16 on torch 2.13, on the CPU.

Batches hold token numbers, so that no tokenizer or data set is needed. TRL is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.trainers.frameworks.hf_loop import HFLoop
from equivcheck.user.trainers.protocol import Record, import_framework
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.trainers.trl_losses import PAIRS, count_labels, forward_inputs, model_inputs
from equivcheck.user.usage import invalid

ROWS: dict[str, dict[str, str]] = {
    "SFT": {"text": "a b"},
    "DPO": {"prompt": "a", "chosen": "b", "rejected": "a"},
    "Reward": {"chosen": "a b", "rejected": "a a"},
    "GRPO": {"prompt": "a"},
}
"""One row of data for each trainer's constructor, which requires a data set. No trainer trains on this row."""
OWN: dict[str, dict[str, Any]] = {
    "SFT": {},
    "DPO": {"precompute_ref_log_probs": True},
    "Reward": {},
    "GRPO": {"per_device_train_batch_size": 2, "num_generations": 2},
}
"""Arguments that a trainer needs because batches have reference log-probabilities and few rows."""
WEIGHTED_BY_TOKENS = ("cispo", "dapo", "vespo")
"""GRPO losses that divide by an update's number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TRL:
    """Adapter for a TRL trainer. Takes the arguments for the trainer's configuration class, such as `SFTConfig`.

    Each microbatch is a pair ``(batch, None)``. Pass a `loss` to `check_training` that takes the model's output and the batch.
    The module `trl_losses` has such a function for each trainer. The number of microbatches in an update comes from `batches`.
    All other arguments stay as they are.
    """

    kind: Literal["SFT", "DPO", "Reward", "GRPO"]
    """The first word in the name of TRL's trainer."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the trainer's configuration class, such as `SFTConfig`."""
    trainer: Any = None
    """Your subclass of TRL's trainer, if you have one."""
    gradients_are: Literal["unclipped", "clipped"] = "clipped"
    """``"clipped"``, because the trainer's callbacks see gradients after clipping."""
    tried: ClassVar[tuple[Tried, ...]] = (
        Tried("trl", "1.16", "1.16"),
        Tried("transformers", "5.24", "5.24"),
    )
    """Tried versions."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run.

        It averages over labels in an update for SFT and most GRPO losses, and over microbatches for other losses.
        """
        if self.kind not in ROWS:
            raise invalid(f"trainer TRL with kind {self.kind!r}", "there is no adapter for it", f"one of {', '.join(ROWS)}")
        if self.arguments.get("bf16") or self.arguments.get("fp16"):
            raise invalid(
                "trainer TRL", "its bf16 or fp16 rounds at other points than the single-device run", "bf16=False and fp16=False"
            )
        return self._step

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        counts = [count_labels(batch) if self._is_weighted else 1 for batch, _ in microbatches]
        total = 0.0
        for (batch, _), count in zip(microbatches, counts, strict=True):
            value = loss(model(**forward_inputs(batch)), batch) * (count / sum(counts))
            value.backward()
            total += float(value.detach())
        norm = clip_grad_norm_(model.parameters(), float(self.arguments.get("max_grad_norm", 1.0)) or math.inf)
        optimizer.step()
        return {"loss": total, "norm": norm}

    @property
    def _is_weighted(self) -> bool:
        has_tokens = self.kind == "GRPO" and self.arguments.get("loss_type", "dapo") in WEIGHTED_BY_TOKENS
        return self.kind == "SFT" or has_tokens

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: Any,  # noqa: ARG002 - accelerate has one group of all ranks
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],  # noqa: ARG002 - the trainer has its own
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with TRL's trainer on this rank. `record` gets each update's values."""
        trl = import_framework("TRL", "trl", "trl")
        loop = HFLoop(
            transformers=import_framework("TRL", "transformers", "transformers"),
            trainer=self.trainer or getattr(trl, f"{self.kind}Trainer"),
            arguments=getattr(trl, f"{self.kind}Config"),
            given={"bf16": False, "logging_strategy": "no", **OWN[self.kind], **self.arguments},
            keywords=self._keywords(),
            methods=METHODS.get(self.kind, {}),
        )
        prepared = [[(_trainer_inputs(self.kind, batch, each), None) for batch, _ in each] for each in batches]
        loop.train(model, prepared, make_optimizer, record)

    def _keywords(self) -> dict[str, Any]:
        from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]

        row = {key: [value] for key, value in ROWS[self.kind].items()}
        rewards = {"reward_funcs": _no_reward} if self.kind == "GRPO" else {}
        return {"train_dataset": Dataset.from_dict(row), "processing_class": _tokenizer(), **rewards}


METHODS: dict[str, dict[str, Any]] = {
    "DPO": {"_precompute_ref_logps": lambda _trainer, dataset, *_given: dataset},
    "GRPO": {"_prepare_inputs": lambda _trainer, batch: batch},
}
"""Methods that are replaced because batches already contain their results: the reference model's log-probabilities, and
completions."""


def _no_reward(completions: Sequence[Any], **_columns: Any) -> list[float]:
    return [0.0] * len(completions)  # batches have advantages


def _trainer_inputs(kind: str, batch: Mapping[str, torch.Tensor], microbatches: Sequence[Any]) -> dict[str, torch.Tensor]:
    if kind in PAIRS:
        return model_inputs(batch) | {key: value for key, value in batch.items() if key.startswith("ref_")}
    if kind != "GRPO":
        return dict(batch)
    num_tokens = torch.tensor(float(sum(count_labels(each) for each, _ in microbatches)))
    dist.all_reduce(num_tokens)  # TRL counts them when it samples
    return {**batch, "num_items_in_batch": num_tokens}


def _tokenizer() -> Any:
    """Build the smallest tokenizer, because TRL's constructors tokenize a row."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found, unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found, unused-ignore]

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
