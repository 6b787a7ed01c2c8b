"""A small Llama-like transformer under data, tensor, sequence and pipeline parallelism: one table row for each layout.

Run it with ``equivcheck matrix examples/llama.py`` or ``python examples/llama.py``. The last layout is wrong on purpose, because
of pytorch issue #190746: inside `loss_parallel`, `log_softmax` always uses the backward of `cross_entropy`. A cross-entropy that
is written out therefore has a correct loss but wrong gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

VOCABULARY, WIDTH, HEADS, SEQUENCE, LAYERS, ROWS, STEPS = 12, 8, 4, 4, 2, 4, 2


class Attention(nn.Module):
    """Causal attention with rotary embeddings. The number of heads follows from the projections' output width."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(rotated(query, angles), rotated(key, angles), value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn each pair of features by an angle that depends on the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1)


class FeedForward(nn.Module):
    """A gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.feed_norm, self.feed = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed(self.feed_norm(x))


class Llama(nn.Module):
    """Language model. A pipeline stage sets the modules that it does not run to None."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        self.register_buffer("angles", torch.outer(torch.arange(SEQUENCE), 0.5 ** torch.arange(1, half + 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens (rows, sequence) to logits (rows, sequence, vocabulary)."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return x if self.output is None else self.output(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def written_out(logits: DTensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy from `log_softmax`, for logits that are sharded along the vocabulary."""
    chosen = functional.one_hot(targets.flatten(), VOCABULARY).to(logits.dtype)
    chosen = distribute_tensor(chosen, logits.device_mesh, [Shard(1)])
    return -(functional.log_softmax(logits.flatten(0, 1), dim=-1) * chosen).sum() / len(chosen)


def ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Replicate the model and average gradients."""
    return DistributedDataParallel(model)


def fsdp2(model: Llama, mesh: DeviceMesh) -> None:
    """Shard each layer. On a mesh with two axes, the first one replicates the shards (HSDP)."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard projections by columns, then by rows. Activations between layers are replicated."""
    for layer in model.layers.values():
        parallelize_module(layer, mesh, _of_layer(whole_from=Replicate()))


def sequence_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard as `tensor_parallel` does, and the vocabulary in embedding and output, and activations along the sequence."""
    part = Shard(1)
    prepared = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(part, None), desired_input_layouts=(Replicate(), None)),
        "feed_norm": SequenceParallel(),
        "feed": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(Replicate(),)),
    }
    for layer in model.layers.values():
        parallelize_module(layer, mesh, prepared | _of_layer(whole_from=part))
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


def _of_layer(whole_from: Placement) -> dict[str, ParallelStyle]:
    """Parallel styles for one layer's projections. `whole_from` is the output placement of the row-wise ones."""
    columns = ("attention.query", "attention.key", "attention.value", "feed.gate", "feed.up")
    rows = ("attention.output", "feed.down")
    return {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel(output_layouts=whole_from) for name in rows}


def fsdp2_of_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard each tensor-parallel shard over the data-parallel ranks, too."""
    sequence_parallel(model, mesh["tp"])
    fsdp2(model, mesh["dp"])


def step_in_loss_parallel(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Train one step with logits that stay sharded along the vocabulary."""
    inputs, targets = batch
    optimizer.zero_grad()
    with loss_parallel():
        value = loss(model(inputs), targets)
        value.backward()
    optimizer.step()
    return value.full_tensor()


def step_written_out(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
    """Train one step with the written-out loss, which is the bug."""
    return step_in_loss_parallel(model, batch, optimizer, written_out)


class Stage(nn.Module):
    """One rank's layers and the schedule that runs them."""

    def __init__(self, model: Llama, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model, self.number = model, mesh.get_local_rank()
        if self.number == 0:
            del model.layers["1"]
            model.norm = model.output = None
        else:
            del model.layers["0"]
            model.embedding = None
        stage = PipelineStage(model, self.number, LAYERS, torch.device("cpu"), group=mesh.get_group())
        self.schedule = Schedule1F1B(stage, LAYERS, loss_fn=cross_entropy)


def step_of_stage(stage: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor | None:
    """Run one step with the schedule, which averages gradients over microbatches. Only the last stage has a loss."""
    inputs, targets = batch
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    if stage.number == 0:
        stage.schedule.step(inputs)
    else:
        stage.schedule.step(target=targets, losses=losses)
    optimizer.step()
    return torch.stack(losses).mean() if losses else None


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and next tokens for each step."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator) for _ in range(STEPS)]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


matrix = equivcheck.Matrix(
    model=Llama,
    batches=batches(),
    loss=cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    layouts={
        "DDP": {"mesh": {"dp": 2}, "parallelize": ddp},
        "FSDP2": {"mesh": {"dp": 2}, "parallelize": fsdp2},
        "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallelize": fsdp2},
        "TP": {"mesh": {"tp": 2}, "parallelize": tensor_parallel},
        "TP + SP, loss parallel": {
            "mesh": {"tp": 2},
            "parallelize": sequence_parallel,
            "rank_step": step_in_loss_parallel,
        },
        "FSDP2 x TP": {
            "mesh": {"dp": 2, "tp": 2},
            "parallelize": fsdp2_of_tensor_parallel,
            "rank_step": step_in_loss_parallel,
        },
        "pipeline": {"mesh": {"pp": 2}, "parallelize": Stage, "rank_step": step_of_stage},
        "loss written out (pytorch #190746)": {
            "mesh": {"tp": 2},
            "parallelize": sequence_parallel,
            "rank_step": step_written_out,
            "expected": "diverged",
        },
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
