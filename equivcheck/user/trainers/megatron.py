"""Adapter for megatron-core: tensor and sequence parallelism, pipelines, experts, DDP, DistributedOptimizer.

Tried with megatron-core 0.16 on torch 2.13, on the CPU, in float32. megatron-core is imported on ranks only, in the world
``gloo``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.loop import call_model
from equivcheck.user.trainers.frameworks.megatron_parts import Placed, gradient_runs, placed_parameters, state_parts_of
from equivcheck.user.trainers.frameworks.megatron_stand_ins import import_megatron, megatron_on_cpu
from equivcheck.user.trainers.protocol import Record, number_of_microbatches
from equivcheck.user.trainers.tried import Tried
from equivcheck.user.usage import invalid

SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
"""Mesh axes, and Megatron's names for their sizes."""
USUAL = {
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "pipeline_dtype": torch.float32,
}
"""`TransformerConfig` fields without fused CUDA kernels and dropout. If you set such a field, your value wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCore:
    """Adapter for megatron-core's schedules, `DistributedDataParallel` and optimizers.

    Pass the same model in plain PyTorch to `check_training`, with Megatron's parameter names and full shapes. The mesh axes
    ``tp`` and ``pp`` give the sizes for tensor and pipeline parallelism. The number of microbatches in an update comes from
    `batches`.
    """

    build: Callable[..., nn.Module]
    """Function that builds Megatron's module on a rank, called as ``build(config, pre_process=..., post_process=...)``."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Fields in Megatron's `TransformerConfig`."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Fields in Megatron's `DistributedDataParallelConfig`."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields in Megatron's `OptimizerConfig`, such as ``clip_grad``. The optimizer itself comes from `check_training`."""
    gradients_are: Literal["unclipped", "clipped"] = "unclipped"
    """``"unclipped"``, because Megatron clips in its optimizer's step."""
    tried: ClassVar[tuple[Tried, ...]] = (Tried("megatron-core", "0.16.1", "0.16.1"),)
    """Tried versions."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run. It averages losses over microbatches, and clips as configured."""
        low = [name for given in (self.transformer, self.optimizer) for name in ("bf16", "fp16", "fp8") if given.get(name)]
        if low:
            raise invalid("trainer MegatronCore", f"its {low[0]} needs a GPU", "float32")
        if self.optimizer.get("optimizer_cpu_offload") or self.optimizer.get("optimizer", "adam") not in {"adam", "sgd"}:
            why = "its optimizer keeps state that this adapter cannot read"
            raise invalid("trainer MegatronCore", why, "optimizer='adam' or 'sgd' without offload")
        return self._step

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in microbatches:
            value = loss(call_model(model, inputs), targets) / len(microbatches)
            value.backward()
            total += float(value.detach())
        norm = clip_grad_norm_(model.parameters(), float(self.optimizer.get("clip_grad", 1.0)) or math.inf)
        optimizer.step()
        return {"loss": total, "norm": norm}

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: Any,
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train on this rank with Megatron's schedule, wrapper and optimizer. `record` gets each update's values."""
        megatron = import_megatron()
        with megatron_on_cpu(megatron):
            config = self._initialize(megatron, mesh)
            wrapped, placed = self._wrapped(megatron, config, model)
            optimizer = self._optimizer(megatron, wrapped, make_optimizer)
            for microbatches in batches:
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                total = _run_schedule(megatron, wrapped, microbatches, loss)
                record.before_update([*gradient_runs(optimizer, placed)])
                _, norm, _ = optimizer.step()
                parameters = [part for each in placed for part in each.parts(each.parameter)]
                record.after_update(total, parameters, norm=None if norm is None else float(norm))
            record.at_end([*state_parts_of(optimizer, placed)])

    def _initialize(self, megatron: SimpleNamespace, mesh: Any) -> Any:
        """Make Megatron's groups, and its configuration with their sizes."""
        axes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        sizes = {name: axes.get(axis, 1) for axis, name in SIZES.items()}
        expert = int(self.transformer.get("expert_model_parallel_size", 1))
        megatron.parallel_state.initialize_model_parallel(**sizes, expert_model_parallel_size=expert)
        place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
        if megatron.parallel_state.get_data_parallel_rank() != place.get("dp", 0):
            raise invalid("mesh", f"its axes {', '.join(axes)} are in another order than Megatron's", "pp, dp, tp")
        config = megatron.transformer.TransformerConfig(**{**USUAL, **self.transformer, **sizes})
        config.finalize_model_grads_func = megatron.distributed.finalize_model_grads
        return config

    def _wrapped(self, megatron: SimpleNamespace, config: Any, model: nn.Module) -> tuple[Any, list[Placed]]:
        state = megatron.parallel_state
        ends = {"pre_process": state.is_pipeline_first_stage(), "post_process": state.is_pipeline_last_stage()}
        module: Any = self.build(config, **ends)
        wrong = {parameter.dtype for parameter in model.parameters()} - {torch.float32}
        if wrong:
            raise invalid(f"dtype {min(map(str, wrong))}", "Megatron's optimizer on the CPU takes float32 only", "torch.float32")
        if not hasattr(module, "set_input_tensor"):
            module.set_input_tensor = lambda _tensor: None  # the schedule calls it without a pipeline, too
        placed = placed_parameters(megatron, module)
        full = dict(model.named_parameters())
        for each in placed:
            if each.name not in full or tuple(full[each.name].shape) != each.shape:
                why = f"it has no parameter like Megatron's {each.name} with the full shape {each.shape}"
                raise invalid("model", why, "parameters with the same names and shapes on one device and on ranks")
            each.load(full[each.name])
        ddp = megatron.distributed.DistributedDataParallelConfig(**self.ddp)
        return megatron.distributed.DistributedDataParallel(config, ddp, module), placed

    def _optimizer(self, megatron: SimpleNamespace, wrapped: Any, make_optimizer: Callable[[list[Any]], Any]) -> Any:
        """Make Megatron's optimizer, and replace the torch optimizer inside it."""
        is_distributed = wrapped.ddp_config.use_distributed_optimizer
        config = megatron.optimizer.OptimizerConfig(**{"lr": 0.0, **self.optimizer, "use_distributed_optimizer": is_distributed})
        optimizer = megatron.optimizer.get_megatron_optimizer(config, [wrapped])
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            if one.optimizer is not None and one.optimizer.param_groups:
                one.optimizer = _replaced(one.optimizer.param_groups, make_optimizer)
        return optimizer


def _replaced(groups: Sequence[dict[str, Any]], make_optimizer: Callable[[list[Any]], Any]) -> Any:
    """Make the user's optimizer for copies, because torch refuses DistributedOptimizer's shards, and put the shards into it."""
    updated = [each for group in groups for each in group["params"]]
    copies = [nn.Parameter(each.detach().clone()) for each in updated]
    updated_by_copy = {id(copy): each for copy, each in zip(copies, updated, strict=True)}
    optimizer = make_optimizer(copies)
    for group in optimizer.param_groups:
        group["params"] = [updated_by_copy[id(copy)] for copy in group["params"]]
        group.update({key: value for key, value in groups[0].items() if key not in group})  # Megatron reads is_expert_parallel
    return optimizer


def _run_schedule(megatron: SimpleNamespace, wrapped: Any, microbatches: Sequence[Any], loss: Any) -> float | None:
    """Run forward and backward over an update's microbatches, with all reductions. Returns the loss on the last stage."""
    run = megatron.pipeline_parallel.get_forward_backward_func()
    rows, length = _rows_and_length(microbatches)

    def forward_step(batches: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        inputs, targets = next(batches)

        def loss_of(outputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            value = loss(outputs, targets)
            return value, {"loss": float(value.detach())}

        return call_model(model, inputs), loss_of

    found = run(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=wrapped,
        num_microbatches=number_of_microbatches([microbatches]),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=False,
    )
    return sum(each["loss"] for each in found) / len(microbatches) if found else None


def _rows_and_length(microbatches: Sequence[Any]) -> tuple[int, int]:
    """Return the first input's shape, because stages must know which shape they receive."""
    inputs, _ = microbatches[0]
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0] if isinstance(inputs, tuple) else inputs
    return int(first.shape[0]), int(first.shape[1])
