"""Adapter for Lightning's `Trainer` under DDP and `ModelParallelStrategy`. Tried with Lightning 2.6 on torch 2.13, on the CPU.

Lightning is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

from equivcheck.user.loop import call_model
from equivcheck.user.trainers.local_parts import gradient_parts, local_parts, state_parts
from equivcheck.user.trainers.protocol import Record, import_framework, number_of_microbatches
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.usage import invalid

NEED_GPU = ("deepspeed", "fsdp")
"""Strategies that Lightning refuses on the CPU begin with these words."""
MIXED = ("bf16-mixed", "bf16")
"""Precisions with autocast in `training_step`. ``bf16`` is an alias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning:
    """Adapter for `lightning.pytorch.Trainer`. Takes the trainer's arguments.

    The number of microbatches in an update comes from `batches`, and the optimizer from `check_training`. All other arguments
    stay as they are.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `lightning.pytorch.Trainer`. The strategy is DDP unless they name another one."""
    module: Callable[[nn.Module, Callable[[Any, Any], torch.Tensor]], Any] | None = None
    """Function that builds your LightningModule, called as ``module(model, loss)``. By default, its `training_step` only returns
    the loss.
    """
    parallelize: Callable[[nn.Module, Any], Any] | None = None
    """Function called as ``parallelize(model, device_mesh)`` in `configure_model`, with Lightning's mesh. `ModelParallelStrategy`
    needs it.
    """
    gradients_are: Literal["unclipped", "clipped"] = "unclipped"
    """``"unclipped"``, because Lightning clips after its callbacks have seen the gradients."""
    tried: ClassVar[tuple[Tried, ...]] = (Tried("lightning", "2.6", "2.6"),)
    """Tried versions."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run. It averages losses over microbatches, and clips as configured."""
        if self.module is not None and self.parallelize is not None:
            raise invalid(
                "trainer Lightning",
                "it has both module= and parallelize=",
                "only one; a module can parallelize itself in configure_model",
            )
        strategy, precision = self.arguments.get("strategy"), self.arguments.get("precision") or "32"
        if precision not in MIXED and ("16" in str(precision) or "transformer-engine" in str(precision)):
            why = f"its precision {precision!r} rounds at other points than the single-device run"
            raise invalid("trainer Lightning", why, "'32-true', '64-true' or 'bf16-mixed'")
        if isinstance(strategy, str) and strategy.startswith(NEED_GPU):
            raise invalid("trainer Lightning", f"its strategy {strategy!r} needs a GPU", "'ddp' or a ModelParallelStrategy")
        return self._step

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in microbatches:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.arguments.get("precision") in MIXED):
                value = loss(call_model(model, inputs), targets)
            value = value / len(microbatches)
            value.backward()
            total += float(value.detach())
        limit = self.arguments.get("gradient_clip_val") or math.inf
        is_by_value = self.arguments.get("gradient_clip_algorithm") == "value"
        clip_grad_norm_(model.parameters(), math.inf if is_by_value else limit)  # unclipped gradients are read here
        if is_by_value:
            clip_grad_value_(model.parameters(), limit)
        optimizer.step()
        return {"loss": total}

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: Any,  # noqa: ARG002 - Lightning makes its own
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with Lightning's trainer on this rank. `record` gets each update's values."""
        lightning = import_framework("Lightning", "lightning.pytorch", "lightning")
        module = (self.module or _module_class(lightning, self.parallelize))(model, loss)
        optimizers: list[torch.optim.Optimizer] = []

        def configure_optimizers() -> torch.optim.Optimizer:
            optimizers.append(make_optimizer([*model.parameters()]))
            return optimizers[-1]

        module.configure_optimizers = configure_optimizers
        in_order: Any = [each for microbatches in batches for each in microbatches]
        rows: Any = DataLoader(in_order, batch_size=None)
        reader = _reader_class(lightning)(model, record)
        with tempfile.TemporaryDirectory() as folder:
            own = {"accumulate_grad_batches": number_of_microbatches(batches), "max_steps": len(batches)}
            trainer = lightning.Trainer(**self._arguments(), **own, default_root_dir=folder)
            trainer.callbacks.append(reader)
            trainer.fit(module, rows)
        record.at_end(state_parts(optimizers[-1], [*model.named_parameters()]))

    def _arguments(self) -> dict[str, Any]:
        usual = {"strategy": "ddp", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        own = {
            "accelerator": "cpu",
            "devices": dist.get_world_size(),
            "enable_checkpointing": False,
            "use_distributed_sampler": False,  # equivcheck has split the batches, and Lightning's sampler shuffles
        }
        replaced = {*own, "accumulate_grad_batches", "max_steps", "default_root_dir"}
        return {**usual, **{key: value for key, value in self.arguments.items() if key not in replaced}, **own}


def _module_class(lightning: Any, parallelize: Callable[[nn.Module, Any], Any] | None) -> Any:
    class Training(lightning.LightningModule):  # type: ignore[misc]
        """The LightningModule for the user's model and loss."""

        def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
            super().__init__()
            self.model, self.loss = model, loss

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            """Return a microbatch's loss."""
            inputs, targets = batch
            return self.loss(call_model(self.model, inputs), targets)

    if parallelize is None:
        return Training

    def configure_model(module: Any) -> None:
        parallelize(module.model, module.device_mesh)  # in place

    return type("Parallel", (Training,), {"configure_model": configure_model})


def _reader_class(lightning: ModuleType) -> Any:
    class Reader(lightning.Callback):  # type: ignore[misc, name-defined]
        """Callback that reads gradients before clipping, and parameters after an update."""

        def __init__(self, model: nn.Module, record: Record) -> None:
            self.model, self.record, self.loss, self.has_gradients = model, record, 0.0, False

        def on_before_optimizer_step(self, *_given: Any) -> None:
            """Read the gradients. Lightning calls this in the optimizer's closure, between backward and clipping."""
            self.record.before_update(gradient_parts([*self.model.named_parameters()]))
            self.has_gradients = True

        def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_given: Any) -> None:
            """Read the loss, and parameters after an update.

            Lightning calls this for each microbatch. The microbatch's loss is already divided by the number of microbatches.
            """
            self.loss += float(outputs["loss"])
            if self.has_gradients:
                self.record.after_update(self.loss, local_parts(self.model.named_parameters()))
                self.loss, self.has_gradients = 0.0, False

    return Reader
