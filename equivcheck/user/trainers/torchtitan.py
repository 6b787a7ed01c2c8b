"""Adapter for torchtitan's `Trainer`: FSDP2, HSDP, tensor parallelism. Tried with torchtitan 0.3 on torch 2.13, on the CPU.

torchtitan is imported on ranks, and where its model is built.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad_norm_

from equivcheck.system.torch_version import installed_torch, is_torch_in
from equivcheck.user.trainers.frameworks.torchtitan_stand_ins import let_fsdp_add, replace_attention, torchtitan_on_cpu
from equivcheck.user.trainers.local_parts import gradient_parts, local_parts, state_parts
from equivcheck.user.trainers.protocol import Record, import_framework, number_of_microbatches
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.usage import invalid

DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}
"""Mesh axes in torchtitan's order, and its names for their sizes."""
IGNORED = -100
"""Label without a loss."""
NEWER_TORCH = {"spmd_types": "fully_shard refuses its parameters", "pp": "schedules have no arg_mbs"}
"""Reasons why a backend and pipelines need torch 2.14."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTitan:
    """Adapter for `torchtitan.trainer.Trainer`. Takes a function from your config registry.

    Each microbatch is a pair of tokens and labels. The mesh axes ``pp``, ``dp_replicate``, ``dp`` and ``tp`` give the degrees of
    parallelism. Batch size, sequence length and the number of microbatches in an update come from `batches`. The optimizer comes
    from `check_training`. Parameters are in float32. All other fields of the configuration stay as they are.
    """

    config: Callable[[], Any]
    """Function of your config registry that returns a `Trainer.Config`, with the same values at each call."""
    trainer: Any = None
    """Your subclass of torchtitan's `Trainer`, if you have one."""
    gradients_are: Literal["unclipped", "clipped"] = "clipped"
    """``"clipped"``, because the trainer clips before it calls the optimizer."""
    tried: ClassVar[tuple[Tried, ...]] = (Tried("torchtitan", "0.3", "0.3"),)
    """Tried versions."""

    def model(self) -> nn.Module:
        """Build the model without parallelism, for ``check_training(model=trainer.model)``."""
        config = self._config_on_cpu()
        built = config.model_spec.model.build()
        built.init_weights(buffer_device=None)
        module: nn.Module = built
        return module

    def _config_on_cpu(self) -> Any:
        config = self.config()
        if config.compile.enable:
            raise invalid("trainer TorchTitan", "its config compiles, which needs minutes on a CPU", "compile.enable=False")
        replace_attention(config.model_spec.model)
        return config

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run.

        It averages over all labels in an update, and clips as configured.
        """
        config = self.config()
        _require_torch(config.parallelism.spmd_backend, f"spmd_backend {config.parallelism.spmd_backend!r}", "partial_dtensor")
        limit = float(config.training.max_norm)

        def step(model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
            optimizer.zero_grad()
            counts = [int((labels != IGNORED).sum()) for _, labels in microbatches]
            total = 0.0
            for (tokens, labels), count in zip(microbatches, counts, strict=True):
                value = loss(model(tokens), labels) * (count / sum(counts))
                value.backward()
                total += float(value.detach())
            norm = clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            return {"loss": total, "norm": norm}

        return step

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: Any,
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],  # noqa: ARG002 - the configuration has it
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with torchtitan's trainer on this rank. `record` gets each update's values."""
        titan = import_framework("TorchTitan", "torchtitan.trainer", "torchtitan")
        with torchtitan_on_cpu(titan), tempfile.TemporaryDirectory() as folder:
            config = self._prepared(mesh, batches, folder)
            trainer = _recorded(self.trainer or titan.Trainer, record)(config)
            parameters = dict(_named(trainer))
            _load(model, parameters)
            let_fsdp_add(trainer.model_parts)
            optimizer = make_optimizer([*parameters.values()])
            trainer.use_optimizer(optimizer)
            trainer.train()
            trainer.close()
        record.at_end(state_parts(optimizer, [*parameters.items()]))

    def _prepared(self, mesh: Any, batches: Sequence[Sequence[Any]], folder: str) -> Any:
        config = self._config_on_cpu()
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        unknown = [name for name in sizes if name not in DEGREES]
        if unknown or [*sizes] != [name for name in DEGREES if name in sizes]:
            raise invalid(
                "mesh",
                f"torchtitan has no axes {', '.join(sizes)} in this order",
                f"some of {', '.join(DEGREES)}, in this order",
            )
        if "pp" in sizes:
            _require_torch("pp", "pipeline", "no axis pp")
        for axis, degree in DEGREES.items():
            setattr(config.parallelism, degree, sizes.get(axis, 1))
        tokens, _ = batches[0][0]
        number, data = number_of_microbatches(batches), sizes.get("dp", 1) * sizes.get("dp_replicate", 1)
        config.training.steps, config.training.seq_len = len(batches), tokens.shape[1]
        config.training.local_batch_size = tokens.shape[0]
        config.training.global_batch_size = tokens.shape[0] * data * number
        config.training.disable_cuda_graphs = True
        config.training.mixed_precision_param = "float32"
        config.metrics.log_freq, config.dump_folder = 1, folder
        config.checkpoint.enable = config.validator.enable = False
        config.tokenizer = SimpleNamespace(build=lambda **_given: None)
        in_order = [({"input": tokens}, labels) for microbatches in batches for tokens, labels in microbatches]
        config.dataloader = SimpleNamespace(build=lambda **_given: in_order)
        return config


def _require_torch(need: str, name: str, expected: str) -> None:
    if need in NEWER_TORCH and is_torch_in("<2.14"):
        why = f"its {name} needs a newer torch than {installed_torch()}: {NEWER_TORCH[need]}"
        raise invalid("trainer TorchTitan", why, f"torch 2.14, or {expected}")


def _named(trainer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def _load(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy initial weights into a rank's parameters."""
    full = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                parameter.copy_(distribute_tensor(full[name], parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(full[name])


def _recorded(base: Any, record: Record) -> Any:
    class Recorded(base):  # type: ignore[misc]
        """torchtitan's trainer, which records each update's values."""

        def use_optimizer(self, optimizer: Any) -> None:
            """Replace the configured optimizer by `optimizer`, with a constant learning rate."""
            self.optimizers.optimizers = [optimizer]
            constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
            self.lr_schedulers.schedulers = [constant]
            optimizer.register_step_pre_hook(lambda *_given: record.before_update(gradient_parts([*_named(self)])))
            log = self.metrics_processor.log

            def keep_figures(step: int, loss: float, largest: float, norm: float, *given: Any, **keywords: Any) -> None:
                self.logged = loss, norm
                log(step, loss, largest, norm, *given, **keywords)

            self.metrics_processor.log = keep_figures

        def train_step(self, batches: Any) -> None:
            """Train one step, and record loss, gradient norm and parameters."""
            super().train_step(batches)
            loss, norm = self.logged
            record.after_update(loss, local_parts(_named(self)), norm=norm)

    return Recorded
