"""Gradients and state with other placements than their parameters, as in a sharded embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from equivcheck import Outcome, check_training
from equivcheck.system.torch_version import is_torch_in
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Difference, Phase
from support.verdicts import first_divergence
from unit.user.programs import adam, brought, in_ddp

TOKENS, WIDTH = 8, 4
UNEVEN_ROWS = ">=2.11"
"""Earlier torch versions pad the embedding's gradient, and autograd rejects its shape."""
needs_uneven_rows = pytest.mark.skipif(not is_torch_in(UNEVEN_ROWS), reason=f"torch {UNEVEN_ROWS} shards rows unevenly")


class Tokens(nn.Module):
    """A small language model: embedding, norm, linear, head."""

    def __init__(self, vocabulary: int = TOKENS) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, WIDTH), nn.LayerNorm(WIDTH)
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits for each token."""
        return self.head(self.linear(self.norm(self.embedding(tokens))))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD whose momentum starts as a gradient, with the gradient's placements."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard rows of the embedding and the linear layers, as plans for Llama do."""
    whole = ColwiseParallel(output_layouts=Replicate())
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "linear": whole, "head": whole}
    parallelize_module(model, mesh, plan)


def sharded_with_sequence(model: nn.Module, mesh: DeviceMesh) -> None:
    """`sharded` with sequence parallelism."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "linear": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def under_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each module over the other axis as well."""
    sharded_with_sequence(model, mesh["tp"])
    for module in (model.embedding, model.linear, model.head, model):
        fully_shard(module, mesh=mesh["dp"])


def checked(parallelize: Any, **changes: Any) -> UserVerdict:
    """The verdict on this model."""
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(0, TOKENS, (4, 6), generator=generator) for _ in range(2)) for _ in range(2)]
    usual = {"model": Tokens, "mesh": {"tp": 2}, "batches": batches, "loss": loss, "optimizer": momentum}
    return check_training(**brought(parallelize=parallelize, **usual | changes))


@pytest.mark.parametrize(
    ("parallelize", "changes"),
    [
        (sharded, {}),
        (sharded, {"optimizer": adam}),
        pytest.param(sharded, {"model": lambda: Tokens(TOKENS + 1)}, marks=needs_uneven_rows),
        (sharded_with_sequence, {}),
        (under_fsdp2, {"mesh": {"dp": 2, "tp": 2}}),
    ],
    ids=["momentum", "adam", "uneven", "sequence", "fsdp2"],
)
def test_a_sharded_embedding_is_equivalent(parallelize: Any, changes: dict[str, Any]) -> None:
    """The parameter is Shard(0); gradient and momentum are Replicate."""
    verdict = checked(parallelize, **changes)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def on_gradients(change: Any) -> Any:
    """`sharded`, with a change to the embedding's accumulated gradient."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        sharded(model, mesh)
        model.embedding.weight.register_post_accumulate_grad_hook(lambda parameter: change(parameter, mesh))

    return parallelize


def backward_alone(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """A step without update, because an optimizer would communicate."""
    optimizer.zero_grad()
    value: torch.Tensor = loss(model(batch[0]), batch[1])
    value.backward()
    return value


def test_every_rank_is_held_to_all_that_it_has_of_a_gradient() -> None:
    """All rows of a replicated gradient are compared, because clipping reads all of them."""

    def wrong_elsewhere(parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 1:
            parameter.grad.to_local()[: TOKENS // 2] *= 2

    first = first_divergence(checked(on_gradients(wrong_elsewhere)))
    found = first
    assert (found.phase, found.tensor, found.difference) == (Phase.GRADIENT, "embedding.weight", Difference.RANKS_DISAGREE)


def test_reading_does_not_communicate() -> None:
    """A missing gradient on one rank is reported, and no rank waits."""

    def lost_on_one(parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        parameter.grad = parameter.grad.redistribute(placements=[Shard(1)])
        if mesh.get_rank() == 1:
            parameter.grad = None

    first = first_divergence(checked(on_gradients(lost_on_one), rank_step=backward_alone))
    assert (first.tensor, first.difference) == ("embedding.weight", Difference.MISSING)


def test_functions_of_users_read_dtensors_as_well() -> None:
    """`full_tensors` gathers gradients and state with any placements."""

    def whole(module: nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for name, parameter in module.named_parameters()
        }

    def doubled(parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        parameter.grad.mul_(2)

    for parallelize, mesh in ((sharded, {"tp": 2}), (under_fsdp2, {"dp": 2, "tp": 2})):
        verdict = checked(parallelize, mesh=mesh, full_tensors=whole)
        assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    first = first_divergence(checked(on_gradients(doubled), full_tensors=whole))
    assert (first.phase, first.tensor) == (Phase.GRADIENT, "embedding.weight")


def test_the_hint_at_shards_is_kept_for_shards_of_hand() -> None:
    """A gradient that does not fit its DTensor gets no hint about `cuts`."""

    def too_short(parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        rows = parameter.grad.to_local()[:1]
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        parameter.grad = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, **whole)

    verdict = checked(on_gradients(too_short), rank_step=backward_alone)
    assert verdict.divergence is not None, verdict.describe()
    assert verdict.divergence.difference is Difference.SHAPE
    assert "full_tensors" not in verdict.describe()


class Packed(nn.Module):
    """A gated layer with gate and up projection in one parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.mesh = dim, None
        self.packed = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) if dim == 0 else torch.randn(WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Gate the up projection."""
        packed, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.packed, self.down))
        gate, up = (inputs @ (packed.T if self.dim == 0 else packed)).chunk(2, dim=-1)
        part = (gate.sigmoid() * up) @ down
        return part if self.mesh is None else DTensor.from_local(part, self.mesh, [Partial()]).full_tensor()


def packed(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank holds its part of the gate and its part of the up projection."""
    gate, up = (half.chunk(mesh.size(), model.dim)[mesh.get_local_rank()] for half in model.packed.detach().chunk(2, model.dim))
    placement = _StridedShard(model.dim, split_factor=2)
    model.packed = nn.Parameter(DTensor.from_local(torch.cat([gate, up], model.dim), mesh, [placement], run_check=False))
    model.down = nn.Parameter(distribute_tensor(model.down.detach(), mesh, [Shard(0)]))
    model.mesh = mesh


def packed_in_one_run(model: nn.Module, mesh: DeviceMesh) -> None:
    """The first rank holds the gate, the second the up projection."""
    placement = _StridedShard(model.dim, split_factor=2)
    local = model.packed.detach().chunk(mesh.size(), model.dim)[mesh.get_local_rank()]
    packed(model, mesh)
    model.packed = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_parts_that_are_each_sharded_are_read(dim: int, optimizer: Any) -> None:
    """A wrong position for a packed part is found along either dim."""
    generator = torch.Generator().manual_seed(0)
    features = [tuple(torch.randn(4, WIDTH, generator=generator) for _ in range(2)) for _ in range(2)]
    given = {"model": lambda: Packed(dim), "mesh": {"tp": 2}, "batches": features, "optimizer": optimizer}
    verdict = check_training(**brought(parallelize=packed, **given))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    verdict = check_training(**brought(parallelize=packed_in_one_run, **given, explain=False))
    assert verdict.outcome is Outcome.DIVERGED, verdict.describe()


class WithReference(nn.Module):
    """A wrapper with a second reference to a parameter, as a tied head has."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.tied = next(iter(model.parameters()))
        self.inner = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


@pytest.mark.parametrize("wrap", [in_ddp, lambda model, mesh: fully_shard(model, mesh=mesh)], ids=["ddp", "fsdp2"])
def test_a_second_reference_does_not_rename_a_parameter(wrap: Any) -> None:
    """A parameter keeps its name in the model, even if a wrapper registers it under another name first."""
    check_training(**brought(parallelize=lambda model, mesh: WithReference(model, wrap(model, mesh)))).assert_equivalent()
