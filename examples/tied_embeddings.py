"""A language model whose input and output embeddings share one parameter: one table row for each layout.

The shared weight's gradient is the sum over both uses. Run it with ``equivcheck matrix examples/tied_embeddings.py``. The last
layout is wrong on purpose, because of verl issue #7834: `to_empty` gives every parameter its own storage, which unties the two.
Nothing fails and the first loss is correct, but the two weights then train separately.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

VOCABULARY, WIDTH, SEQUENCE = 12, 6, 4


class Model(nn.Module):
    """Language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (rows, sequence) to logits."""
        x = self.embedding(tokens)
        return self.output(x + torch.tanh(self.layer(x)))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Replicate the model and average gradients."""
    return DistributedDataParallel(model)


def fsdp2(model: Model, mesh: DeviceMesh) -> None:
    """Shard the model. Both embeddings are in one FSDP unit, because they share a parameter."""
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Shard the one parameter along the vocabulary at both ends."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.output.weight = model.embedding.weight


def untied(model: Model, mesh: DeviceMesh) -> None:
    """Bug: `to_empty` allocates each parameter separately on this device, so the tie is lost."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(values)
    fsdp2(model, mesh)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and next tokens for each step."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator) for _ in range(2)]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


matrix = equivcheck.Matrix(
    model=Model,
    batches=batches(),
    loss=cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    layouts={
        "DDP": {"mesh": {"dp": 2}, "parallelize": ddp},
        "FSDP2": {"mesh": {"dp": 2}, "parallelize": fsdp2},
        "TP": {"mesh": {"tp": 2}, "parallelize": tensor_parallel},
        "untied (verl #7834)": {"mesh": {"dp": 2}, "parallelize": untied, "expected": "diverged"},
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
