"""The `torch.distributed.pipelining` schedules that run a rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from equivcheck.layouts.base.data_rows import with_equal_chunks
from equivcheck.layouts.base.gradients_by_hand import sum_gradients
from equivcheck.layouts.base.local_tensors import combined_norm
from equivcheck.layouts.parallelisms.pipeline.balance import add_balance, balance_over_stages
from equivcheck.layouts.parallelisms.pipeline.presplit import (
    TAKES_CHUNKS,
    split_into_chunks,
    step_on_chunks,
    step_on_chunks_privately,
)
from equivcheck.layouts.parallelisms.pipeline.stage_layers import Balance, StageLayers, mask_of
from equivcheck.layouts.parallelisms.pipeline.stages import (
    SharedWeight,
    defers_reduction,
    layers_of_stages,
    stages_of_rank,
    trained_layers,
    weights_of_several_ranks,
)
from equivcheck.scenario import ClipNorm, Pipeline, PipelineSchedule
from equivcheck.scenario.mesh import PP
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.accumulate import scalar_value, scale_loss
from equivcheck.training.material import Batch
from equivcheck.training.model import MLP
from equivcheck.training.setup import Setup
from equivcheck.training.update.clipping import clip_to_norm
from equivcheck.training.update.router_bias import count_choices
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
"""Class name in torch for each schedule."""


class CountingStage(PipelineStage):
    """Stage that adds each chunk's expert counts and load-balancing losses to those of the step.

    Schedules call this method for chunks only. Shape inference and recomputation run the layers as well, but do not count.
    """

    balance: Balance | None = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunk's forward, and count which experts its positions chose."""
        outputs = super().forward_one_chunk(*args, **kwargs)
        count_choices(self.submod)
        if self.balance is not None:
            self.balance.keep()
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """This rank's copy of a trained weight that stages on other ranks use, too."""

    model: nn.Module
    """Model with this rank's stages."""
    name: str
    """Name of the weight in `model`, in one of this rank's stages."""
    group: dist.ProcessGroup
    """Process group of the ranks with a copy."""
    counts: bool
    """Whether this copy counts in the norm over all gradients. Exactly one copy of each weight is counted."""

    @property
    def weight(self) -> nn.Parameter:
        """The copy as a parameter of the model. It is looked up by name, because other parallelisms may have replaced it."""
        return self.model.get_parameter(self.name)

    def sum_gradients(self) -> None:
        """Sum the weight's gradient over all copies."""
        weight = self.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        sum_gradients([weight], self.group)


@dataclass(slots=True, kw_only=True, eq=False)
class Pipe:
    """One rank's part of a pipeline: its stages, and the schedule to run them."""

    setup: Setup
    """This rank's setup."""
    parallelism: Pipeline
    """The pipeline's options."""
    group: dist.ProcessGroup
    """The pipeline's process group."""
    modules: dict[int, StageLayers]
    """Module of each stage on this rank, by stage index."""
    copies: tuple[Copy, ...] = ()
    """This rank's copies of weights that other ranks' stages use, too."""
    step: int = 0
    """Index of the current step."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps names of shared weights in this rank's stages to their names in the full model, if another rank uses them first."""
    divisor: float = 1.0
    """Divisor for losses over labels in the current step."""
    defers_reduction: bool = False
    """Whether only the last `step()` call in a training step reduces gradients of FSDP stages."""
    is_last_call: bool = True
    """Whether the current `step()` call is the last one in its training step."""
    schedules: dict[int, Any] = field(default_factory=dict)
    """Schedule for each number of rows in a microbatch, because a stage's buffers have a fixed shape."""

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return dist.get_world_size(self.group) * self.parallelism.stages_per_rank

    def compute(self, setup: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
        """Run the schedule on each microbatch. Return the loss on the rank with the last stage, otherwise None."""
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(microbatches):
            setup.announce(Stage.COMPUTE, index)
            self.is_last_call = number == len(microbatches) - 1
            with setup.accumulation(self.is_last_call):
                losses += self._run(with_equal_chunks(setup.take(batch), self.parallelism.num_chunks), batch.rows, index)
            setup.announce(Stage.READING, index)
        setup.announce(Stage.COMPUTE, index)
        self.exchange()
        setup.announce(Stage.READING, index)
        balance = self._balance()
        scale = setup.gradient_scale * (self.parallelism.num_chunks if self.parallelism.scale_grads else 1)
        return sum(map(scalar_value, losses)) / scale + balance if self.num_stages - 1 in self.modules else None

    def _balance(self) -> float:
        """Return the step's load-balancing losses in all stages."""
        training = self.setup.training
        if not training.model.balances:
            return 0.0
        return balance_over_stages([*self.modules.values()], getattr(torch, training.precision.value), self.group)

    def exchange(self) -> None:
        """Sum the gradients of each shared weight over its copies."""
        for copy in self.copies:
            copy.sum_gradients()

    def clip(self, _module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Clip gradients by their norm over all stages, because torch does not. Each shared weight counts once."""
        counted_elsewhere = {copy.weight for copy in self.copies if not copy.counts}
        norm = self.total_norm([parameter for parameter in parameters if parameter not in counted_elsewhere], clipping)
        clip_to_norm(parameters, clipping, norm)
        return norm

    def total_norm(self, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Return the norm of the gradients of `parameters` on all stages, including their shards on other ranks."""
        norm = self.setup.total_norm(parameters, clipping)
        # Without gradients it is a float32, whatever the other ranks send.
        return combined_norm(norm.to(getattr(torch, self.setup.training.precision.value)), clipping.norm_type, self.group)

    def _run(self, part: Batch, rows: int, index: int) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = (part.inputs,) if 0 in self.modules else ()
        targets = part.targets if self.num_stages - 1 in self.modules else None
        # The schedule cannot split a tensor without rows into chunks.
        masks = {mask_of(layer): mask for layer, mask in enumerate(part.masks) if mask is not None and len(mask)}
        self.step, self.divisor = index, part.divisor
        for module in self.modules.values():
            module.step = index
        schedule, options = self._schedule(part, rows), {}
        if self.defers_reduction:
            options["finalize_gradients"] = self.is_last_call
        if self.parallelism.presplit:
            chunks = split_into_chunks(part.inputs if inputs else None, masks, targets, self.parallelism.num_chunks)
            (step_on_chunks if is_torch_in(TAKES_CHUNKS) else step_on_chunks_privately)(schedule, chunks, losses, **options)
        else:
            schedule.step(*inputs, target=targets, losses=losses, **options, **masks)
        return losses

    def _schedule(self, part: Batch, rows: int) -> Any:
        """Return the schedule for microbatches with `rows` rows over all ranks. Each schedule is built once."""
        if rows not in self.schedules:
            self.schedules[rows] = self._build(part, rows)
        return self.schedules[rows]

    def _build(self, part: Batch, rows: int) -> Any:
        parallelism = self.parallelism
        parts = zip(self.modules, self.setup.parts, strict=True)
        stages = [self._stage(number, called, part) for number, called in parts]
        kind = getattr(torch_schedules, SCHEDULES[parallelism.schedule])
        made = stages[0] if parallelism.schedule.is_single else stages
        return kind(made, parallelism.num_chunks, loss_fn=self.loss_of_chunk(rows), scale_grads=parallelism.scale_grads)

    def loss_of_chunk(self, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a loss function for the schedule: it computes the share of one chunk in the step's loss.

        The schedule splits each microbatch, with `rows` rows, into chunks.
        """
        counted = rows if self.parallelism.scale_grads else rows // self.parallelism.num_chunks
        return (
            self.loss_of_own_rows if self.parallelism.presplit else lambda outputs, targets: self.loss(outputs, targets, counted)
        )

    def loss_of_own_rows(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the share of a chunk in the step's loss, weighted by its rows without padding."""
        assert self.setup.layout is not None, "a layout is applied"
        scale = self.parallelism.num_chunks if self.parallelism.scale_grads else 1
        return self.loss(outputs, targets, len(targets) * self.setup.layout.num_data_ranks * scale)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the loss on `rows` rows, scaled so that the sum over all rows is the step's loss.

        Outputs without targets pad a chunk, and are left out. The result is also multiplied by the gradient scale, because the
        schedule calls backward on it.
        """
        setup = self.setup
        outputs = outputs if len(outputs) == len(targets) else outputs[: len(targets)]
        loss = scale_loss(setup, setup.loss(setup.training, outputs, targets, self.divisor), rows, self.step)
        return loss if setup.gradient_scale == 1.0 else loss * setup.gradient_scale

    def _stage(self, number: int, called: nn.Module, part: Batch) -> PipelineStage:
        options = self._shapes(self.modules[number], part) if self.parallelism.static_shapes else {}
        if self.parallelism.sends_dtensors:
            options["get_mesh"] = lambda _names, _layout: self.setup.activation_mesh
        model, given = self.setup.training.model, (called, number, self.num_stages, torch.device("cpu"))
        if not model.has_router_bias and not model.balances:
            return PipelineStage(*given, group=self.group, **options)
        stage = CountingStage(*given, group=self.group, **options)
        stage.balance = self.modules[number].balance
        return stage

    def _shapes(self, module: StageLayers, part: Batch) -> dict[str, Any]:
        """Return an example input and output for the stage, with shape, element type and need for a gradient."""
        model, rows = self.setup.training.model, part.rows // self.parallelism.num_chunks
        first, last = module.indices[0], module.indices[-1]
        trained, is_last = trained_layers(model), last == len(model.layers) - 1
        embeds = model.source is not None and not model.source.frozen
        learns = embeds or any(trained[: last + 1]) or module.scale is not None or module.head is not None
        positions = () if model.length is None else tuple(part.inputs.shape[1:2])
        dtype = getattr(torch, self.setup.training.precision.value)

        def chunk(*shape: int, needs_grad: bool) -> torch.Tensor:
            return torch.empty(rows, *positions, *shape, dtype=dtype, requires_grad=needs_grad)

        is_fed = module.embed is not None
        return {
            "input_args": part.inputs[:rows]
            if is_fed
            else chunk(model.in_features(first), needs_grad=embeds or any(trained[:first])),
            "output_args": chunk(*(model.output_shape if is_last else (model.in_features(last + 1),)), needs_grad=learns),
        }


def build_pipeline(setup: Setup, parallelism: Pipeline, mesh: DeviceMesh) -> None:
    """Keep only this rank's stages in the model, and let a schedule run each step."""
    rank, ranks, model = mesh.get_local_rank(), mesh.size(), setup.model
    assert isinstance(model, MLP), "the model is a stack"
    spans = layers_of_stages(parallelism, ranks, len(model.layers))
    modules = {
        stage: StageLayers(model, spans[stage], is_first=stage == 0, is_last=stage == len(spans) - 1)
        for stage in stages_of_rank(parallelism, rank, ranks)
    }
    for stage in modules.keys() - {len(spans) - 1} if parallelism.sends_dtensors else ():
        assert setup.activation_mesh is not None, "layers compute DTensors"
        modules[stage].sends = setup.activation_mesh, setup.activation_placements[spans[stage].stop]
    copies = tuple(_copies(setup, weights_of_several_ranks(setup.training.model, parallelism, ranks), rank))
    names = _leave(model, modules.values())
    pipe = Pipe(setup=setup, parallelism=parallelism, group=mesh.get_group(), modules=modules, copies=copies, names=names)
    setup.parts, setup.has_stages, setup.compute = [*modules.values()], True, pipe.compute
    setup.num_chunks = parallelism.num_chunks
    add_balance(setup, parallelism, [*modules.values()])


def finish_pipeline(setup: Setup) -> None:
    """Clip by the norm over all stages, and give shared weights their names in the full model.

    This runs after the other parallelisms, because they may replace parameters, and the function for the norm over one stage.
    """
    pipe = pipe_of(setup)
    assert pipe is not None, "the pipeline is applied before it is finished"
    setup.clip_norm = pipe.clip
    assert setup.layout is not None, "a layout is applied"
    pipe.defers_reduction = defers_reduction(setup.training, setup.layout)
    for own, name in pipe.names.items():
        _keep_name(setup.model, name, setup.model.get_parameter(own))


def pipe_of(setup: Setup) -> Pipe | None:
    """Return the rank's `Pipe`. None under a layout without a pipeline."""
    pipe = getattr(setup.compute, "__self__", None)
    return pipe if isinstance(pipe, Pipe) else None


def _copies(setup: Setup, shared: Sequence[SharedWeight], rank: int) -> Iterator[Copy]:
    """Yield this rank's copies of shared weights. Every rank must call this function, because all ranks create each group."""
    assert setup.layout is not None, "a layout is applied"
    lines = setup.layout.mesh.lines(PP)
    for weight in shared:
        if weight.trained:
            groups = {line: group_of(tuple(line[number] for number in weight.ranks)) for line in lines}
            if rank in weight.ranks:
                (group,) = (group for line, group in groups.items() if line[rank] == dist.get_rank())
                name = next(module for module, number in weight.uses if number == rank)
                yield Copy(model=setup.model, name=f"{name}.weight", group=group, counts=rank == weight.first_rank)


def _leave(model: MLP, modules: Collection[StageLayers]) -> dict[str, str]:
    """Remove other stages' parameters from the model. Returns other names in the full model by the remaining names."""
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
    return {name: names[parameter] for name, parameter in model.named_parameters() if name != names[parameter]}


def _keep_name(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a shared weight under its name in the full model, even if this rank has no such module."""
    *path, last = name.split(".")
    module = model
    for part in path:
        found = getattr(module, part, None)
        if not isinstance(found, nn.Module):
            setattr(module, part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
