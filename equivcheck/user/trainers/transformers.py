"""Adapter for `transformers.Trainer` under DDP. Tried with transformers 5.24 and accelerate 1.15 on torch 2.13, on the CPU.

transformers is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.trainers.protocol import LocalPart, Record, import_framework, number_of_microbatches

IGNORED = -100
"""Label without a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTrainer:
    """Adapter for `transformers.Trainer`. Takes arguments for `TrainingArguments`.

    Each microbatch is a pair ``(batch, None)``: keywords for the model, with ``labels`` among them. The model returns its loss.
    Accumulation follows from the batches. All other arguments stay as they are.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `transformers.TrainingArguments`."""
    shifts_labels: bool = True
    """Whether the model predicts the next token, so that each row's first label has no loss."""
    gradients_are: Literal["unclipped", "clipped"] = "clipped"
    """The trainer's callbacks see gradients after clipping."""

    def reference_step(self) -> Callable[..., Any]:
        """Average over all labels in an update, and clip as configured."""
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
        """Train with transformers' trainer."""
        transformers = import_framework("HFTrainer", "transformers", "transformers accelerate")
        number = number_of_microbatches(batches)
        named = [*model.named_parameters()]

        class Reading(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            """Callback that reads gradients before the optimizer's step, and parameters after it."""

            def on_pre_optimizer_step(self, *_given: Any, **_keywords: Any) -> None:
                """Record gradients, clipped by now."""
                record.before_update([*_parts((name, each.grad) for name, each in named)])

            def on_optimizer_step(self, *_given: Any, **_keywords: Any) -> None:
                """Record parameters, loss and norm, before the trainer sets gradients to zero."""
                record.after_update(trainer.take_loss(), [*_parts(named)], norm=trainer.norm)

        class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
            """Trainer that takes this rank's batches in the given order."""

            norm: float | None = None
            losses: list[float] = []  # noqa: RUF012 - one trainer per process

            def get_train_dataloader(self) -> Any:
                """Return the batches, which equivcheck has split over ranks."""
                return [dict(batch) for microbatches in batches for batch, _ in microbatches]

            def training_step(self, *given: Any, **keywords: Any) -> torch.Tensor:
                """Keep a microbatch's loss."""
                value: torch.Tensor = super().training_step(*given, **keywords)
                self.losses = [*self.losses, float(value)]
                return value

            def take_loss(self) -> float:
                """Return the loss over all microbatches in this update."""
                total, self.losses = sum(self.losses), []
                return total

            def _get_grad_norm(self, *given: Any, **keywords: Any) -> Any:
                """Keep the norm, which the trainer only logs."""
                found = super()._get_grad_norm(*given, **keywords)
                self.norm = float(found)
                return found

        optimizer = make_optimizer([parameter for _, parameter in named])
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(**self._arguments(folder, number, len(batches)))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
            trainer = InOrder(model=model, args=arguments, optimizers=(optimizer, schedule), callbacks=[Reading()])
            trainer.train()
        record.at_end([*_state(optimizer, named)])

    def _arguments(self, folder: str, num_microbatches: int, num_updates: int) -> dict[str, Any]:
        own = {
            "output_dir": folder,
            "use_cpu": True,
            "ddp_backend": "gloo",
            "gradient_accumulation_steps": num_microbatches,
            "max_steps": num_updates,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        return {**self.arguments, **own}


def _parts(named: Iterable[tuple[str, torch.Tensor | None]]) -> Iterator[LocalPart]:
    for name, tensor in named:
        if tensor is not None:
            yield LocalPart(name=name, shape=tuple(tensor.shape), tensor=tensor.detach().clone())


def _state(optimizer: Any, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[LocalPart]:
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            yield from _parts([(f"{name}/{key}", torch.as_tensor(value))])
