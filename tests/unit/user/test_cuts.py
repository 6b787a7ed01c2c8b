"""Plain shards are read at the positions in `cuts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, check_training
from equivcheck.errors import UsageError
from equivcheck.user.running import members_of, run_training
from equivcheck.user.traces.cuts import Cuts
from equivcheck.worlds.ranks import Run
from equivcheck.worlds.trace.stage import Stage
from support.verdicts import first_divergence
from unit.user.programs import STEPS, Total, batches, brought, said, task_of

CUTS = {"0.*": ((0, "tp"),), "2.weight": ((1, "tp"),)}
HIDDEN = 5


def build() -> nn.Module:
    """A model whose hidden width splits unevenly over two ranks."""
    return nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))


class Columns(nn.Module):
    """This rank's outputs of a linear layer."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        part = slice(*((0, 3), (3, 5))[mesh.get_local_rank("tp")])
        self.weight = nn.Parameter(linear.weight.detach()[part].clone())
        self.bias = nn.Parameter(linear.bias.detach()[part].clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute this rank's outputs."""
        return nn.functional.linear(inputs, self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer over this rank's inputs."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        part = slice(*((0, 3), (3, 5))[mesh.get_local_rank("tp")])
        self.weight = nn.Parameter(linear.weight.detach()[:, part].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.group = mesh.get_group("tp")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        return Total.apply(nn.functional.linear(inputs, self.weight), self.group) + self.bias


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Column-wise, then row-wise, as in Megatron's perceptron."""
    model[0], model[2] = Columns(model[0], mesh), Rows(model[2], mesh)


SIZES = (8, 4, 4)
"""Sizes of the components in a fused dim: four pairs of queries, four keys and four values."""


class Fused(nn.Module):
    """Queries, keys and values come from one weight, which may be transposed."""

    group: dist.ProcessGroup | None = None
    num_ranks = 1

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        weight = torch.randn(sum(SIZES), 4)
        self.weight = nn.Parameter(weight if dim == 0 else weight.T.contiguous())
        self.bias = nn.Parameter(torch.randn(sum(SIZES)))
        self.down, self.dim, self.scale = nn.Linear(8, 2, bias=False), dim, nn.Parameter(torch.randn(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply each pair of queries with its key and value."""
        outputs = inputs @ (self.weight.T if self.dim == 0 else self.weight) + self.bias
        query, key, value = outputs.split([size // self.num_ranks for size in SIZES], -1)
        out = self.down((query.unflatten(-1, (-1, 2)) * (key * value.tanh())[..., None]).flatten(-2))
        return self.scale * (out if self.group is None else Total.apply(out, self.group))


def cut_components(model: Any, mesh: DeviceMesh) -> None:
    """Each rank has half of each component."""
    for name, dim in (("weight", model.dim), ("bias", 0)):
        halves = [part.chunk(2, dim)[mesh.get_local_rank("tp")] for part in getattr(model, name).detach().split(SIZES, dim)]
        setattr(model, name, nn.Parameter(torch.cat(halves, dim)))
    model.down.weight = nn.Parameter(model.down.weight.detach().chunk(2, 1)[mesh.get_local_rank("tp")].clone())
    model.group, model.num_ranks = mesh.get_group("tp"), 2


def in_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply DDP."""
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def in_fsdp1(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP1 with one flat parameter. A rank's run of it may end within a row of a component."""
    group = mesh.get_group("dp")
    return FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True)


def in_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP2, which shards dim 0 again. A shard may have parts of two components."""
    for module in (*(each for each in model.children() if isinstance(each, Columns)), model):
        fully_shard(module, mesh=mesh["dp"])


LAYOUTS = pytest.mark.parametrize("outer", [None, in_ddp, in_fsdp1, in_fsdp2], ids=lambda value: getattr(value, "__name__", "tp"))
"""Data parallelism around shards, or none."""


def require_agreement(model: Callable[[], nn.Module], shard: Callable[..., None], outer: Any, cuts: Cuts) -> None:
    """Check that a sharded model agrees with one device, and that all its state was read."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> Any:
        shard(model, mesh)
        return None if outer is None else outer(model, mesh)

    mesh = {"tp": 2} if outer is None else {"dp": 2, "tp": 2}
    verdict = check_training(**brought(model=model, parallelize=parallelize, mesh=mesh), cuts=cuts)
    verdict.assert_equivalent()
    assert not verdict.unread


def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the three sharded parameters from all ranks."""
    found = {name: value.detach() for name, value in module.named_parameters()}
    return found | {name: everywhere(found[name], dim) for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))}


def everywhere(part: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate three rows from the first rank and two from the second."""
    padded = torch.zeros(3, *part.movedim(dim, 0).shape[1:], dtype=part.dtype)
    padded[: part.shape[dim]] = part.movedim(dim, 0)
    parts = [torch.empty_like(padded) for _ in range(2)]
    dist.all_gather(parts, padded)
    return torch.cat(parts)[:HIDDEN].movedim(0, dim)


@LAYOUTS
def test_shards_are_read_where_they_lie(outer: Any) -> None:
    """Uneven shards are compared with gradients and state, also under data parallelism."""
    require_agreement(build, cut, outer, CUTS)


@LAYOUTS
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_each_component_are_read_where_they_lie(outer: Any, dim: int) -> None:
    """A fused weight is compared with its gradients and state, along both dims."""
    cuts = {"weight": ((dim, "tp", SIZES),), "bias": ((0, "tp", SIZES),), "down.weight": ((1, "tp"),)}
    require_agreement(lambda: Fused(dim=dim), cut_components, outer, cuts)


def test_a_wrong_gradient_in_a_component_is_seen_where_it_is() -> None:
    """The second rank's last row is the last row of the full weight."""

    def wrong(model: Any, mesh: DeviceMesh) -> None:
        cut_components(model, mesh)
        factors = torch.ones(8, 1, dtype=model.weight.dtype)
        factors[-1] += mesh.get_rank()
        model.weight.register_hook(lambda gradient: gradient * factors)

    cuts = {"weight": ((0, "tp", SIZES),), "bias": ((-1, "tp", SIZES),), "down.weight": ((1, "tp"),)}
    first = first_divergence(check_training(**brought(model=lambda: Fused(dim=0), parallelize=wrong, mesh={"tp": 2}), cuts=cuts))
    assert (first.phase.value, first.index[0], first.rank) == ("gradient", 15, 1)


def test_equal_components_are_given_by_their_number() -> None:
    """Ranks with components of 8, 4 and 4 rows have others than ranks with four components."""
    cuts = {"weight": ((0, "tp", 4),), "bias": ((0, "tp", [4, 4, 4, 4]),), "down.weight": ((1, "tp"),)}
    verdict = check_training(**brought(model=lambda: Fused(dim=0), parallelize=cut_components, mesh={"tp": 2}), cuts=cuts)
    assert verdict.outcome is Outcome.DIVERGED


@pytest.mark.parametrize(("how", "num_calls"), [({"cuts": CUTS}, 0), ({"full_tensors": gathered}, 3 * 2 * STEPS + 3 * 2)])
def test_reading_them_takes_no_call(how: dict[str, Any], num_calls: int) -> None:
    """Unlike `full_tensors`, `cuts` needs no collective."""
    given = brought(model=build, mesh=(("tp", 2),), data_axes=(), parallelize=cut, batches=tuple(batches())) | how
    task = task_of(**given)
    ran = run_training(members_of(task, "sim"), task, 0, 60.0).left
    assert isinstance(ran, Run)
    assert sum(call.stage is Stage.READING for call in ran.calls[0]) == num_calls


def test_cuts_reach_other_processes() -> None:
    """Ranks in other processes read shards at the same positions."""
    check_training(**brought(model=build, parallelize=cut, mesh={"tp": 2}, world="gloo"), cuts=CUTS).assert_equivalent()


def test_a_wrong_gradient_of_a_shard_is_seen_where_it_is() -> None:
    """The verdict has the index in the full parameter."""

    def wrong(model: nn.Module, mesh: DeviceMesh) -> None:
        cut(model, mesh)
        model[2].weight.register_hook(lambda gradient: gradient * (1 + mesh.get_rank()))

    first = first_divergence(check_training(**brought(model=build, parallelize=wrong, mesh={"tp": 2}), cuts=CUTS))
    assert (first.phase.value, first.tensor) == ("gradient", "2.weight")
    assert first.index[1] >= 3


def test_a_shard_of_unknown_place_names_what_says_it() -> None:
    """Without `cuts`, the verdict recommends it."""
    verdict = check_training(**brought(model=build, parallelize=cut, mesh={"tp": 2}))
    assert verdict.outcome is Outcome.DIVERGED
    assert "cuts={name: ((dim, axis),)}" in said(verdict)


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ([("0.weight", 0)], r"cuts \[\('0.weight', 0\)\] .* Expected a dict such as \{'0.weight': \(\(0, 'tp'\),\)\}"),
        ({"0.weight": (0, "tp")}, r"cuts\['0.weight'\]: \(0, 'tp'\)"),
        ({"0.weight": ((0, "pp"),)}, r"each axis from tp at most once"),
        ({"0.weight": ((0, "tp"), (1, "tp"))}, r"at most once"),
        (
            {"1.weight": ((0, "tp"),)},
            r"cuts\['1.weight'\] .* no parameter .* 0.weight, 0.bias, 2.weight, 2.bias",
        ),
        ({"0.bias": ((1, "tp"),)}, r"cuts\['0.bias'\] .* shape \(5,\) has no dim 1\. Expected a dim from -1 to 0"),
        ({"0.weight": ((0, "tp", 0),)}, r"pairs of dim and axis, or triples of dim, axis and components"),
        (
            {"0.weight": ((0, "tp", 2),)},
            r"with components 2 .* dim 0 of shape \(5, 4\) has 5 elements\. Expected a number of components",
        ),
        ({"0.weight": ((0, "tp", (4, 2)),)}, r"with components \(4, 2\) .* or component sizes with the sum"),
        ({"0.weight": ((1, "tp"),)}, r"'0.weight' .* the shape \(5, 2\) of the full shape \(5, 4\), but its tensor has \(3, 4\)"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(cuts: Any, text: str) -> None:
    """One line names a valid value."""
    with pytest.raises(UsageError, match=text):
        check_training(**brought(model=build, parallelize=cut, mesh={"tp": 2}, batches=batches(steps=1)), cuts=cuts)


def test_cuts_beside_a_function_that_gathers_are_refused() -> None:
    """Both arguments together contradict each other."""
    with pytest.raises(UsageError, match="cuts together with full_tensors"):
        check_training(**brought(model=build, parallelize=cut, mesh={"tp": 2}), cuts=CUTS, full_tensors=lambda _module: {})
