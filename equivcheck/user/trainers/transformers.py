"""Adapter for `transformers.Trainer` under DDP and FSDP2. Tried with transformers 5.9 to 5.24 and torch 2.13, on the CPU.

transformers is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.trainers.frameworks.hf_loop import HFLoop
from equivcheck.user.trainers.protocol import Record, import_framework
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.usage import invalid

IGNORED = -100
"""Label without a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTrainer:
    """Adapter for `transformers.Trainer`. Takes arguments for `TrainingArguments`.

    Each microbatch is a pair ``(batch, None)``. A batch is a dict with the model's keywords, including ``labels``. The model
    returns its loss. The number of microbatches in an update comes from `batches`. All other arguments stay as they are.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `transformers.TrainingArguments`."""
    trainer: Any = None
    """Your subclass of `transformers.Trainer`, if you have one."""
    shifts_labels: bool = True
    """Whether the model predicts the next token, so that each row's first label has no loss."""
    gradients_are: Literal["unclipped", "clipped"] = "clipped"
    """``"clipped"``, because the trainer's callbacks see gradients after clipping."""
    tried: ClassVar[tuple[Tried, ...]] = (Tried("transformers", "5.9", "5.24"),)
    """Tried versions."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the step for one device. It averages over all labels in an update and clips as configured."""
        low = [name for name in ("bf16", "fp16") if self.arguments.get(name)]
        if low:
            raise invalid("trainer HFTrainer", f"its {low[0]} rounds at other places than one device", f"{low[0]}=False")
        return self._step

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        counts = [self._num_labels(batch) for batch, _ in microbatches]
        total = 0.0
        for (batch, targets), count in zip(microbatches, counts, strict=True):
            value = loss(model(**batch), targets) * (count / sum(counts))
            value.backward()
            total += float(value.detach())
        norm = clip_grad_norm_(model.parameters(), float(self.arguments.get("max_grad_norm", 1.0)) or math.inf)
        optimizer.step()
        return {"loss": total, "norm": norm}

    def _num_labels(self, batch: Mapping[str, torch.Tensor]) -> int:
        labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        return int((labels != IGNORED).sum())

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: Any,  # noqa: ARG002 - accelerate has one group of all ranks
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],  # noqa: ARG002 - the model returns its loss
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with transformers' trainer on this rank. `record` gets each update's values."""
        transformers = import_framework("HFTrainer", "transformers", "transformers accelerate")
        loop = HFLoop(
            transformers=transformers,
            trainer=self.trainer or transformers.Trainer,
            arguments=transformers.TrainingArguments,
            given=self.arguments,
        )
        loop.train(model, batches, make_optimizer, record)
