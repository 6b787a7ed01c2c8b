"""A model's stages, and the `torch.distributed.pipelining` schedules that run them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from equivcheck.layouts.parallelisms.pipeline.stages import (
    SharedWeight,
    layers_of_stages,
    stages_of_rank,
    trained_layers,
    weights_of_several_ranks,
)
from equivcheck.scenario import ClipNorm, NormType, Pipeline, PipelineSchedule
from equivcheck.training.accumulate import scalar_value, scale_loss
from equivcheck.training.material import Batch
from equivcheck.training.model import MLP
from equivcheck.training.setup import Setup
from equivcheck.worlds.meshes import group_of
from equivcheck.worlds.trace.stage import Stage

SCHEDULES: dict[PipelineSchedule, str] = {
    PipelineSchedule.GPIPE: "ScheduleGPipe",
    PipelineSchedule.ONE_F_ONE_B: "Schedule1F1B",
    PipelineSchedule.LOOPED_BFS: "ScheduleLoopedBFS",
    PipelineSchedule.INTERLEAVED: "ScheduleInterleaved1F1B",
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    PipelineSchedule.ZBV: "ScheduleZBVZeroBubble",
    PipelineSchedule.DUAL_PIPE_V: "ScheduleDualPipeV",
}
"""Class names in torch."""


class StageLayers(nn.Module):
    """Consecutive layers of a pipeline stage as one module.

    The first stage starts with the embedding, the last ends with the head. Stages take only tensors, because torch versions
    treat other arguments differently.
    """

    step: int

    def __init__(self, model: MLP, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.indices, self.step = layers, 0
        # These two are methods, so the modules below register the parameters for the schedule, under their names in the model.
        self.embed, self.finish = model.embed if is_first else None, model.finished if is_last else None
        self.embedding, self.positions = (model.embedding, model.positions) if is_first else (None, None)
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in layers})
        self.head = model.head if is_last else None
        self.scale = model.scale if is_last and "scale" in model._parameters else None

    def forward(self, inputs: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        """Run the stage on tokens or activations.

        Dropout masks are named by layer.
        """
        values = inputs if self.embed is None else self.embed(inputs)
        for index, block in zip(self.indices, self.layers.values(), strict=True):
            values = block(values, masks.get(_mask_of(index)), self.step)
        return values if self.finish is None else self.finish(values)


def _mask_of(layer: int) -> str:
    return f"mask_{layer}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """This rank's copy of a trained weight that stages on other ranks use, too."""

    weight: nn.Parameter
    """Parameter."""
    group: dist.ProcessGroup
    """Process group for the ranks with a copy."""
    counts: bool
    """Whether this copy counts in the norm over all gradients. Exactly one copy of each weight counts."""

    def sum_gradients(self) -> None:
        """Sum the gradient over all copies."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        dist.all_reduce(self.weight.grad, group=self.group)


@dataclass(slots=True, kw_only=True, eq=False)
class Pipe:
    """The stages of one rank, and the schedule that runs them."""

    setup: Setup
    """The training's setup."""
    parallelism: Pipeline
    """The pipeline's options."""
    group: dist.ProcessGroup
    """The pipeline's process group."""
    modules: dict[int, StageLayers]
    """Each stage's module on this rank, by stage index."""
    copies: tuple[Copy, ...] = ()
    """Weights that other ranks' stages use, too."""
    step: int = 0
    """Index of the current step."""
    divisor: float = 1.0
    """Divisor for losses over labels in the current step."""
    schedules: dict[int, Any] = field(default_factory=dict)
    """Schedule for each number of rows, because a stage's buffers have a fixed shape."""

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return dist.get_world_size(self.group) * self.parallelism.stages_per_rank

    def compute(self, setup: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
        """Run the schedule for each microbatch. Returns the loss on the rank with the last stage, otherwise None."""
        losses: list[torch.Tensor] = []
        for batch in microbatches:
            setup.announce(Stage.COMPUTE, index)
            losses += self._run(setup.take(batch), batch.rows, index)
            setup.announce(Stage.READING, index)
        setup.announce(Stage.COMPUTE, index)
        self.exchange()
        setup.announce(Stage.READING, index)
        scale = self.parallelism.num_chunks if self.parallelism.scale_grads else 1
        return sum(map(scalar_value, losses)) / scale if self.num_stages - 1 in self.modules else None

    def exchange(self) -> None:
        """Sum gradients over the copies of each shared weight."""
        for copy in self.copies:
            copy.sum_gradients()

    def clip(self, _module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Clip by the norm over all stages. Each shared weight counts once."""
        return clip_across(self.group, parameters, clipping, {copy.weight for copy in self.copies if not copy.counts})

    def _run(self, part: Batch, rows: int, index: int) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = (part.inputs,) if 0 in self.modules else ()
        targets = part.targets if self.num_stages - 1 in self.modules else None
        masks = {_mask_of(layer): mask for layer, mask in enumerate(part.masks) if mask is not None}
        self.step, self.divisor = index, part.divisor
        for module in self.modules.values():
            module.step = index
        self._schedule(part, rows).step(*inputs, target=targets, losses=losses, **masks)
        return losses

    def _schedule(self, part: Batch, rows: int) -> Any:
        """Schedule for microbatches with `rows` rows over all ranks, built once."""
        if rows not in self.schedules:
            self.schedules[rows] = self._build(part, rows)
        return self.schedules[rows]

    def _build(self, part: Batch, rows: int) -> Any:
        parallelism = self.parallelism
        stages = [self._stage(number, part) for number in self.modules]
        kind = getattr(torch_schedules, SCHEDULES[parallelism.schedule])
        made = stages[0] if parallelism.schedule.is_single else stages
        return kind(made, parallelism.num_chunks, loss_fn=self.loss_of_chunk(rows), scale_grads=parallelism.scale_grads)

    def loss_of_chunk(self, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a function that computes a chunk's part of the step's loss, for microbatches with `rows` rows."""
        counted = rows if self.parallelism.scale_grads else rows // self.parallelism.num_chunks
        return lambda outputs, targets: scale_loss(self.setup, self.loss(outputs, targets), counted, self.step)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss for outputs and targets."""
        return self.setup.loss(self.setup.training, outputs, targets, self.divisor)

    def _stage(self, number: int, part: Batch) -> PipelineStage:
        module = self.modules[number]
        shapes = self._shapes(module, part) if self.parallelism.static_shapes else {}
        return PipelineStage(module, number, self.num_stages, torch.device("cpu"), group=self.group, **shapes)

    def _shapes(self, module: StageLayers, part: Batch) -> dict[str, Any]:
        """Example input and output for the stage, with shape, element type and need for a gradient."""
        model, rows = self.setup.training.model, part.rows // self.parallelism.num_chunks
        first, last = module.indices[0], module.indices[-1]
        trained, is_last = trained_layers(model), last == len(model.layers) - 1
        embeds = model.source is not None and not model.source.frozen
        learns = embeds or any(trained[: last + 1]) or module.scale is not None or module.head is not None
        positions = () if model.length is None else (model.length,)
        dtype = getattr(torch, self.setup.training.precision.value)

        def chunk(features: int, needs_grad: bool) -> torch.Tensor:
            return torch.empty(rows, *positions, features, dtype=dtype, requires_grad=needs_grad)

        is_fed = module.embed is not None
        return {
            "input_args": part.inputs[:rows] if is_fed else chunk(model.in_features(first), embeds or any(trained[:first])),
            "output_args": chunk(model.out_features if is_last else model.in_features(last + 1), learns),
        }


def build_pipeline(setup: Setup, parallelism: Pipeline, mesh: DeviceMesh) -> None:
    """Keep this rank's stages, and let a schedule compute each step."""
    rank, ranks, model = mesh.get_local_rank(), mesh.size(), setup.model
    assert isinstance(model, MLP), "the model is a stack"
    spans = layers_of_stages(parallelism, ranks, len(model.layers))
    modules = {
        stage: StageLayers(model, spans[stage], is_first=stage == 0, is_last=stage == len(spans) - 1)
        for stage in stages_of_rank(parallelism, rank, ranks)
    }
    copies = tuple(_copies(model, weights_of_several_ranks(setup.training.model, parallelism, ranks), rank))
    pipe = Pipe(setup=setup, parallelism=parallelism, group=mesh.get_group(), modules=modules, copies=copies)
    setup.compute, setup.clip_norm = pipe.compute, pipe.clip
    _leave(model, modules.values())


def _copies(model: MLP, shared: Sequence[SharedWeight], rank: int) -> Iterator[Copy]:
    """This rank's copies of shared weights. Every rank must call it, because all ranks create each group."""
    for weight in shared:
        if weight.trained:
            group = group_of(weight.ranks)
            if rank in weight.ranks:
                yield Copy(weight=model.get_parameter(weight.name), group=group, counts=rank == weight.first_rank)


def _leave(model: MLP, modules: Collection[StageLayers]) -> None:
    """Remove other stages' parameters from the model. Shared weights keep their names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = {index for module in modules for index in module.indices}
    for index in range(len(model.layers)):
        if index not in kept:
            model.layers[index] = nn.Identity()
    if all(module.embed is None for module in modules):
        model.embedding = model.positions = None
    if all(module.finish is None for module in modules):
        model.head = None
        model.register_parameter("scale", None)
    for name, parameter in [*model.named_parameters()]:
        if name != names[parameter]:
            _keep_name(model, names[parameter], parameter)


def _keep_name(model: MLP, name: str, parameter: nn.Parameter) -> None:
    """Register a shared weight under its name in the full model, even if this rank has no such module."""
    *path, last = name.split(".")
    module: nn.Module = model
    for part in path:
        found = getattr(module, part, None)
        if not isinstance(found, nn.Module):
            setattr(module, part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def clip_across(
    group: dist.ProcessGroup, parameters: list[torch.Tensor], clipping: ClipNorm, counted_elsewhere: Collection[torch.Tensor] = ()
) -> torch.Tensor:
    """Clip by the norm over the parameters of all stages, which torch leaves to users. Returns the norm before clipping."""
    order = float(clipping.norm_type.value)
    counted = (parameter for parameter in parameters if parameter not in counted_elsewhere)
    gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, order).to(parameters[0].dtype)
    if clipping.norm_type is NormType.INF:
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
    else:
        norm = norm**order
        dist.all_reduce(norm, group=group)
        norm = norm ** (1.0 / order)
    nn.utils.clip_grads_with_norm_(parameters, clipping.max_norm, norm)
    return norm
