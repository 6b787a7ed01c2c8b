"""Modules that compute with one rank's part, or more often than on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unit.user.diagnosis.wrong_trainings import Wrong, by_hand, nothing, rank, step_of
from unit.user.programs import Total, batches, brought

NUM_TOKENS = 6
IN_TP = {"mesh": {"tp": 2}}


class CountingCalls(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two values per row."""
        self.seen += torch.tensor([3.0, 0.1])
        return self.linear(inputs)


class Recomputed(nn.Module):
    """A model that counts its calls. Ranks compute it again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = CountingCalls()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two values per row."""
        return checkpoint(self.counting, inputs, use_reentrant=False) if dist.is_initialized() else self.counting(inputs)


class Words(nn.Module):
    """Mean of word vectors, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Two values per row."""
        return self.head(self.embedding(tokens).mean(1))


def words(steps: int = 3) -> list[Any]:
    """Tokens and targets for each step."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randint(NUM_TOKENS, (4, 3), generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(steps)
    ]


def own_part(tensor: torch.Tensor, dim: int) -> nn.Parameter:
    """This rank's part of a tensor, as a parameter."""
    return nn.Parameter(tensor.detach().chunk(2, dim)[rank()].clone())


Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from row numbers in the rank's shard and the shard to outputs."""


def vocabulary_parallel(says: str, lookup: Lookup) -> Wrong:
    """An embedding with rows split over ranks. `lookup` is each rank's part of the sum."""

    def parallelize(model: Words, mesh: DeviceMesh) -> nn.Module:
        weight = model.embedding.weight = own_part(model.embedding.weight, 0)
        first = rank() * len(weight)
        model.embedding.forward = lambda tokens: Total.apply(lookup(tokens - first, weight), mesh.get_group())
        return model

    cuts = {"embedding.weight": ((0, "tp"),)}
    return Wrong(says=says, brought=brought(model=Words, batches=words(), cuts=cuts, parallelize=parallelize, **IN_TP))


def is_held(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mask of the rows that the shard has."""
    return (rows >= 0) & (rows < len(weight))


def nearest_row(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up another rank's tokens in the nearest row."""
    return functional.embedding(rows.clamp(0, len(weight) - 1), weight)


def first_row(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up another rank's tokens in the first row, as Megatron does before it masks them."""
    return functional.embedding(rows.where(is_held(rows, weight), 0), weight)


def without_last_row(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mask the shard's last row as well."""
    return nearest_row(rows, weight) * (is_held(rows, weight) & (rows < len(weight) - 1))[..., None]


def split_between(inner: Callable[[], nn.Module], changes: Callable[[Any, DeviceMesh], None]) -> dict[str, Any]:
    """Arguments for a column-wise layer, another module and a row-wise layer. `changes` replaces the module on ranks."""

    def parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
        up, down, bias = model[0], model[2], model[2].bias
        up.weight, down.weight = own_part(up.weight, 0), own_part(down.weight, 1)
        down.forward = lambda values: Total.apply(functional.linear(values, down.weight), mesh.get_group()) + bias
        changes(model[1], mesh)
        return model

    cuts = {"0.weight": ((0, "tp"),), "2.weight": ((1, "tp"),), "1.weight": ((0, "tp"),)}
    model = lambda: nn.Sequential(nn.Linear(4, 8, bias=False), inner(), nn.Linear(8, 2))  # noqa: E731
    return brought(model=model, parallelize=parallelize, cuts=cuts, **IN_TP)


class OwnNorm(nn.Module):
    """A norm of the user's own, without `normalized_shape`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values divided by the root of their mean square."""
        return values * (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def of_own_features(module: Any, _mesh: DeviceMesh) -> None:
    """Normalize over the features that the rank has."""
    module.weight = own_part(module.weight, 0)
    if hasattr(module, "normalized_shape"):
        module.normalized_shape = (4,)


class GroupedAttention(nn.Module):
    """Four query heads, and two heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, width, bias=False) for width in (8, 4, 4))
        self.out = nn.Linear(8, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two values per position."""
        query, key, value = (layer(inputs).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if not dist.is_initialized():
            attended = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        else:
            attended = functional.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
        return self.out(attended.transpose(1, 2).flatten(-2))


def sequences(steps: int = 3) -> list[Any]:
    """Sequences and targets for each step."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(2, 5, 4, generator=generator), torch.randn(2, 5, 2, generator=generator)) for _ in range(steps)]


def largest(parameters: list[torch.Tensor]) -> None:
    """Reduce gradients to their maximum."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)


def unequal(*arguments: Any) -> Any:
    """Return another loss on each rank; the mean is right."""
    return step_of(reduce=nothing)(*arguments) + (0.1 if rank() else -0.1)


UNMASKED = "the 2 tp ranks do not mask each other's tokens: each looks them up in the"
OWN_FEATURES = "each of the 2 tp ranks normalizes over its own features in `1`, not over all"

MODULES: dict[str, Wrong] = {
    "reduced_to_the_maximum": by_hand("all gradients are the maximum over the 2 dp ranks, not the mean", reduce=largest),
    "nearest_row": vocabulary_parallel(f"{UNMASKED} nearest row of its own shard of `embedding.weight`", nearest_row),
    "first_row": vocabulary_parallel(f"{UNMASKED} first row of its own shard of `embedding.weight`", first_row),
    "last_token_lost": vocabulary_parallel("the last token of each vocabulary shard of `embedding.weight`", without_last_row),
    "norm_of_own_features": Wrong(says=OWN_FEATURES, brought=split_between(lambda: nn.RMSNorm(8), of_own_features)),
    "own_norm_of_own_features": Wrong(says=OWN_FEATURES, brought=split_between(OwnNorm, of_own_features)),
    "heads_in_wrong_order": Wrong(
        says="key and value heads are repeated in the wrong order, so query heads use the wrong ones",
        brought=brought(model=GroupedAttention, batches=sequences(), parallelize=lambda model, _mesh: model, **IN_TP),
    ),
    "counted_again": Wrong(
        says="the forward of the model runs 2 times for each call on one device, and changes buffers each time",
        brought=brought(model=Recomputed, batches=batches(6, steps=1), mesh={"tp": 3}),
    ),
    "losses_differ": Wrong(
        says="your step returns a loss that differs between the 2 tp ranks: only the mean over them is right",
        brought=brought(parallelize=lambda model, _mesh: model, rank_step=unequal, **IN_TP),
    ),
}
"""Mistakes of modules, and others."""
