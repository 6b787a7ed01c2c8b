"""A transformer block under FSDP2 and tensor parallelism on 2 x 2 ranks.

Attention and feed-forward are sharded by columns, then by rows. Between them, norms included, activations are sharded along the
sequence over the tensor-parallel ranks (sequence parallelism). Run it with ``python examples/transformer_block.py``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from equivcheck import check_training

WIDTH, HEADS, SEQUENCE = 16, 4, 6


class Attention(nn.Module):
    """Causal attention. The number of heads follows from the projections' output width."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.feed_norm, self.feed = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism over `tp` to the block's layers, then FSDP2 over `dp` to the whole block."""
    whole_from_rows = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "": PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        ),
        "attention_norm": SequenceParallel(),
        "attention": whole_from_rows,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "feed_norm": SequenceParallel(),
        "feed": whole_from_rows,
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def main() -> None:
    """Check three AdamW steps on 2 x 2 ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, SEQUENCE, WIDTH)
    batches = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(3)]
    verdict = check_training(
        model=Block,
        parallelize=parallelize,
        mesh={"dp": 2, "tp": 2},
        batches=batches,
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    print(verdict.describe())
    verdict.assert_equivalent()


if __name__ == "__main__":
    main()
