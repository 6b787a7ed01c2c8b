"""One training of a small language model under many layouts, written as users write it: only torch is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, HIDDEN, TOKENS, ROWS = 31, 24, 4, 40, 8, 12
"""Sizes of the model, and tokens and rows in each microbatch."""
STEPS, MICROBATCHES, NUM_CHUNKS, MAX_NORM, RATE = 3, 2, 2, 0.5, 0.01

Schedule = Callable[..., Any]


class Attention(nn.Module):
    """Causal self-attention. A tensor-parallel rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> Any:
        """Attend to earlier positions."""
        query, key, value = (
            layer(inputs).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: torch.Tensor) -> Any:
        """Hidden states."""
        return checkpoint(self._compute, inputs, use_reentrant=False) if self.checkpoints else self._compute(inputs)

    def _compute(self, inputs: torch.Tensor) -> Any:
        hidden = inputs + self.attention(self.attention_norm(inputs))
        return hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    """A small language model. A pipeline stage has some of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> Any:
        """Logits for each token."""
        hidden = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / MICROBATCHES


def _loss_of_chunk(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _loss(logits, labels) / NUM_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchLayout:
    """A layout that a function applies."""

    mesh: dict[str, int]
    """Axis names and sizes. Ranks along ``dp`` and ``replicate`` have other rows."""
    apply: Callable[[Decoder, DeviceMesh], nn.Module]
    """Returns the module to train."""
    schedule: Schedule | None = None
    """Class for a pipeline's schedule."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())


def _ddp(model: Decoder, _mesh: DeviceMesh, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def _compiled(model: Decoder, _mesh: DeviceMesh) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="eager")  # type: ignore[return-value]


def _fsdp1(model: Decoder, mesh: DeviceMesh, strategy: str = "FULL_SHARD", *, use_orig_params: bool = True) -> nn.Module:
    # Wrapped layers and the root have a flat parameter each.
    for name, layer in list(model.layers.items()):
        model.layers[name] = _fsdp1_unit(layer, mesh, strategy, use_orig_params)
    return _fsdp1_unit(model, mesh, strategy, use_orig_params)


def _fsdp1_unit(module: nn.Module, mesh: DeviceMesh, strategy: str, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        module,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fsdp2(model: Decoder, mesh: DeviceMesh, *, checkpoints: bool = False, **options: Any) -> nn.Module:
    for layer in model.layers.values():
        layer.checkpoints = checkpoints  # type: ignore[assignment]
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _replicate(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return replicate(model, device_mesh=mesh)


def _tensor_parallel(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    inner = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, inner | {"attention.o": RowwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def _sequence_parallel(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    by_positions, whole = Shard(1), Replicate()
    inner: dict[str, Any] = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
    inner |= {name: RowwiseParallel(output_layouts=by_positions) for name in ("attention.o", "down")}
    inner |= {name: SequenceParallel() for name in ("attention_norm", "norm")}
    for name in ("attention", "up"):
        gathered = PrepareModuleInput(input_layouts=by_positions, desired_input_layouts=whole)
        inner |= {name: gathered} if name == "attention" else {name: ColwiseParallel(input_layouts=by_positions)}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, inner)
    outer = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_positions),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=by_positions, output_layouts=whole),
    }
    return parallelize_module(model, mesh, outer)


def _both(inner: Callable[..., nn.Module], outer: Callable[..., nn.Module], model: Decoder, mesh: DeviceMesh) -> nn.Module:
    inner(model, mesh["tp"])
    return outer(model, mesh["dp"])


def _stage(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    number = mesh.get_local_rank()
    del model.layers[str(1 - number)]
    if number == 0:
        model.norm = model.head = None
    else:
        model.embedding = None
    return model


LAYOUTS: dict[str, TorchLayout] = {
    "DDP": TorchLayout(mesh={"dp": 2}, apply=_ddp),
    "DDP on 4": TorchLayout(mesh={"dp": 4}, apply=_ddp),
    "FSDP1": TorchLayout(mesh={"dp": 2}, apply=_fsdp1),
    "FSDP1 on 3": TorchLayout(mesh={"dp": 3}, apply=_fsdp1),
    "hybrid FSDP1": TorchLayout(mesh={"replicate": 2, "dp": 2}, apply=partial(_fsdp1, strategy="HYBRID_SHARD")),
    "FSDP2": TorchLayout(mesh={"dp": 2}, apply=_fsdp2),
    "FSDP2 on 3": TorchLayout(mesh={"dp": 3}, apply=_fsdp2),
    "HSDP": TorchLayout(mesh={"replicate": 2, "dp": 2}, apply=_fsdp2),
    "TP": TorchLayout(mesh={"tp": 2}, apply=_tensor_parallel),
    "SP": TorchLayout(mesh={"tp": 2}, apply=_sequence_parallel),
    "FSDP2 x TP": TorchLayout(mesh={"dp": 2, "tp": 2}, apply=partial(_both, _tensor_parallel, _fsdp2)),
    "pipeline, GPipe": TorchLayout(mesh={"pp": 2}, apply=_stage, schedule=ScheduleGPipe),
    # Pairs are made of the layouts above.
    "DDP, static graph": TorchLayout(mesh={"dp": 2}, apply=partial(_ddp, static_graph=True, gradient_as_bucket_view=True)),
    "DDP, compiled": TorchLayout(mesh={"dp": 2}, apply=_compiled),
    "replicate": TorchLayout(mesh={"dp": 2}, apply=_replicate),
    "FSDP1, gradients sharded": TorchLayout(mesh={"dp": 2}, apply=partial(_fsdp1, strategy="SHARD_GRAD_OP")),
    "FSDP2, checkpointing": TorchLayout(mesh={"dp": 2}, apply=partial(_fsdp2, checkpoints=True, reshard_after_forward=False)),
    "TP on 4": TorchLayout(mesh={"tp": 4}, apply=_tensor_parallel),
    "FSDP2 x SP": TorchLayout(mesh={"dp": 2, "tp": 2}, apply=partial(_both, _sequence_parallel, _fsdp2)),
    "pipeline, 1F1B": TorchLayout(mesh={"pp": 2}, apply=_stage, schedule=Schedule1F1B),
}
"""Layouts by name."""
NUM_PAIRED = 12
"""Number of layouts that are compared with each other, the first ones."""


def train(layout: str | None, dtype: str) -> None:
    """Train on one device, or on this rank."""
    torch.manual_seed(0)
    model = Decoder().to(getattr(torch, dtype))
    if layout is None:
        _loop(model, slice(None), _clip, None)
        return
    chosen = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(chosen.mesh.values()), mesh_dim_names=tuple(chosen.mesh))
    module = chosen.apply(model, mesh)
    parts, part = 1, 0
    for name in chosen.mesh:
        if name in ("replicate", "dp"):
            parts, part = parts * mesh[name].size(), part * mesh[name].size() + mesh[name].get_local_rank()
    clip = _clip
    if "pp" in chosen.mesh or (isinstance(module, FullyShardedDataParallel) and dtype == "float64"):
        # FSDP1's own function computes norms in float32, and refuses float64.
        clip = partial(_clip_across, group=mesh.get_group("pp" if "pp" in chosen.mesh else "dp"))
    _loop(module, slice(part, None, parts), clip, _schedule(chosen, module, mesh))


def _schedule(chosen: TorchLayout, module: nn.Module, mesh: DeviceMesh) -> Any:
    if chosen.schedule is None:
        return None
    stage = PipelineStage(module, mesh.get_local_rank(), mesh.size(), torch.device("cpu"), group=mesh.get_group())
    # A schedule would divide all gradients at each call, those of earlier microbatches as well.
    return chosen.schedule(stage, n_microbatches=NUM_CHUNKS, loss_fn=_loss_of_chunk, scale_grads=False)


def _batches() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        drawn = torch.randint(VOCABULARY, (MICROBATCHES, ROWS, TOKENS + 1), generator=generator)
        yield [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def _loop(module: nn.Module, own: slice, clip: Callable[[nn.Module], None], schedule: Any) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, eps=1e-4, foreach=False)
    for batch in _batches():
        optimizer.zero_grad()
        for tokens, labels in batch:
            if schedule is None:
                _loss(module(tokens[own]), labels[own]).backward()  # type: ignore[no-untyped-call]
            else:
                schedule.step(*((tokens,) if dist.get_rank() == 0 else ()), **({"target": labels} if dist.get_rank() else {}))
        clip(module)
        optimizer.step()


def _clip(module: nn.Module) -> None:
    if isinstance(module, FullyShardedDataParallel):
        module.clip_grad_norm_(MAX_NORM)
        return
    parameters = [each for each in module.parameters() if each.grad is not None]
    _clip_by(parameters, torch.stack([_norm(each.grad) for each in parameters]).norm())


def _norm(gradient: Any) -> torch.Tensor:
    squares = gradient.detach().square().sum()
    return (squares.full_tensor() if isinstance(squares, DTensor) else squares).sqrt()


def _clip_across(module: nn.Module, group: Any) -> None:
    parameters = [each for each in module.parameters() if each.grad is not None]
    squares = torch.stack([_norm(each.grad) for each in parameters]).to(torch.float64).square().sum()
    dist.all_reduce(squares, group=group)
    _clip_by(parameters, squares.sqrt())


def _clip_by(parameters: list[nn.Parameter], norm: torch.Tensor) -> None:
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=False)
