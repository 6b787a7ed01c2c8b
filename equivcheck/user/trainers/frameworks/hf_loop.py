"""Trains with transformers' `Trainer` or a subclass, such as TRL's. Batches are taken in order, and each update is recorded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from equivcheck.user.trainers.local_parts import gradient_parts, local_parts, state_parts
from equivcheck.user.trainers.protocol import LocalPart, Record, import_or_refuse, number_of_microbatches
from equivcheck.user.usage import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class HFLoop:
    """A trainer's class with its arguments. `train` builds and runs the trainer."""

    transformers: Any
    """The package `transformers`."""
    trainer: Any
    """The trainer's class."""
    arguments: Any
    """The arguments' class, such as `TrainingArguments`."""
    given: Mapping[str, Any]
    """Arguments from the user."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords for the trainer's class."""
    methods: Mapping[str, Any] = field(default_factory=dict)
    """Methods by name. They replace methods of the trainer's class."""
    place: Callable[[list[LocalPart]], list[LocalPart]] = list
    """Called with local parts, returns them with their positions in the full tensors."""

    def train(
        self, model: nn.Module, batches: Sequence[Sequence[Any]], make_optimizer: Callable[[list[Any]], Any], record: Record
    ) -> None:
        """Train on this rank's batches. `record` gets each update's values."""
        state: Any = import_or_refuse(self.trainer.__name__, "accelerate.state", "accelerate")
        state.AcceleratorState._reset_state(reset_partial_state=True)  # accelerate 1.15 keeps the process's last strategy
        in_order = [dict(batch) for microbatches in batches for batch, _ in microbatches]
        optimizer = make_optimizer([*model.parameters()])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):  # arguments set variables for FSDP
            own = {
                "gradient_accumulation_steps": number_of_microbatches(batches),
                "max_steps": len(batches),
                "output_dir": folder,
            }
            trainer_class = _in_order(self.trainer, in_order, self.methods)
            arguments = self._built_arguments({**self.given, **OWN, **own})
            trainer = trainer_class(model=model, args=arguments, optimizers=(optimizer, schedule), **self.keywords)
            trainer.add_callback(_reader(self, trainer, model, record))
            trainer.train()
        record.at_end(self.place(state_parts(optimizer, [*model.named_parameters()])))

    def _built_arguments(self, given: Mapping[str, Any]) -> Any:
        try:
            return self.arguments(**given)
        except (ImportError, TypeError, ValueError) as error:
            name = self.arguments.__name__
            why = f"{name} refuses its arguments ({' '.join(str(error).split())})"
            raise invalid(f"trainer {self.trainer.__name__}", why, f"arguments that {name} takes in this version") from error


OWN = {"use_cpu": True, "ddp_backend": "gloo", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
"""Arguments that equivcheck sets."""


def _in_order(base: Any, batches: list[dict[str, Any]], methods: Mapping[str, Any]) -> Any:
    class InOrder(base):  # type: ignore[misc]
        """Trainer that takes this rank's batches in order."""

        norm: float | None = None
        losses: list[float] = []  # noqa: RUF012 - one trainer per process

        def get_train_dataloader(self) -> Any:
            """Return this rank's batches, which equivcheck has split already."""
            return batches

        def training_step(self, *given: Any, **keywords: Any) -> torch.Tensor:
            """Run transformers' training step, and keep the microbatch's loss."""
            value: torch.Tensor = super().training_step(*given, **keywords)
            self.losses = [*self.losses, float(value)]
            return value

        def take_loss(self) -> float:
            """Return the sum of the losses since the last call: the loss of one update."""
            total, self.losses = sum(self.losses), []
            return total

        def _get_grad_norm(self, *given: Any, **keywords: Any) -> Any:
            """Return the gradient norm, and keep it, because the trainer only logs it."""
            found = super()._get_grad_norm(*given, **keywords)
            self.norm = float(found)
            return found

    return type("InOrder", (InOrder,), dict(methods))


def _reader(loop: HFLoop, trainer: Any, model: nn.Module, record: Record) -> Any:
    base: Any = loop.transformers.TrainerCallback

    class Reading(base):  # type: ignore[misc]
        """Callback that reads gradients before an update, and parameters after it."""

        def on_pre_optimizer_step(self, *_given: Any, **_keywords: Any) -> None:
            """Read the gradients. They are clipped already."""
            record.before_update(loop.place(gradient_parts([*model.named_parameters()])))

        def on_optimizer_step(self, *_given: Any, **_keywords: Any) -> None:
            """Read the parameters after the update, before the trainer sets gradients to zero."""
            parts = loop.place(local_parts(model.named_parameters()))
            record.after_update(trainer.take_loss(), parts, norm=trainer.norm)

    return Reading()
