"""Correct trainings are EQUIVALENT under every kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from equivcheck import Outcome, check_training
from equivcheck.layouts.parallelisms.ddp.zero_redundancy import ZeroRedundancyOptimizer
from support.verdicts import first_divergence
from unit.user.programs import adam, batches, brought, build, in_ddp


def in_fsdp1(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP1 with original parameters."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def in_flat_fsdp1(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP1 with flat parameters, by layers."""
    for index in (0, 3):
        model[index] = FullyShardedDataParallel(model[index], device_id=torch.device("cpu"))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def in_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP2 in place, by layers."""
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)


def in_ddp_over_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply DDP over tensor parallelism."""
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())})
    return DistributedDataParallel(model, device_mesh=mesh["dp"])


def in_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism without a data axis."""
    parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=torch.distributed.tensor.Replicate())})


@pytest.mark.parametrize(
    ("parallelize", "mesh"),
    [
        (in_ddp, {"dp": 2}),
        (in_ddp, {"dp": 1}),
        (in_fsdp1, {"fsdp": 2}),
        (in_flat_fsdp1, {"dp": 2}),
        (in_fsdp2, {"dp_replicate": 2, "dp_shard": 2}),
        (in_ddp_over_tp, {"dp": 2, "tp": 2}),
        (in_tp, {"tp": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_torch_offers_is_equivalent(parallelize: Callable[..., Any], mesh: dict[str, int]) -> None:
    """Every torch parallelism is read with its state, and agrees."""
    verdict = check_training(**brought(parallelize=parallelize, mesh=mesh))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert verdict.precision == "float64"
    verdict.assert_equivalent()


class Halved(nn.Module):
    """A linear layer with half the rows on each rank, as a plain shard."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().chunk(2)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(2)[rank].clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Concatenate both ranks' outputs."""
        return _Gathered.apply(nn.functional.linear(inputs, self.weight, self.bias))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(2, dim=-1)[dist.get_rank()].contiguous()


def halve_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the first layer explicitly; its input needs no gradient."""
    model[0] = Halved(model[0], mesh.get_rank())


def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return full tensors under the model's names."""
    halves = {f"0.{name}": all_gather_tensor(part.detach(), 0, dist.group.WORLD) for name, part in module[0].named_parameters()}
    rest = {f"{index}.{name}": part for index in (2, 3) for name, part in module[index].named_parameters()}
    return halves | rest


def test_shards_of_hand_are_read_by_a_function() -> None:
    """`full_tensors` gathers parameters, gradients and state. Without it, shapes differ."""
    arguments = brought(parallelize=halve_first, mesh={"tp": 2})
    verdict = check_training(**arguments, full_tensors=gathered)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert not verdict.unread
    unread = check_training(**arguments)
    assert unread.outcome is Outcome.DIVERGED
    assert "full_tensors" in unread.describe()


class Renamed(nn.Module):
    """A `Halved` layer with new names."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.w1, self.b1 = Halved(linear, rank).parameters()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Concatenate both ranks' outputs."""
        return _Gathered.apply(nn.functional.linear(inputs, self.w1, self.b1))


def renamed_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the first layer and rename its halves."""
    model[0] = Renamed(model[0], mesh.get_rank())


def gathered_by_old_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return full tensors under the model's names."""
    halves = {
        f"0.{name}": all_gather_tensor(part.detach(), 0, dist.group.WORLD)
        for name, part in zip(("weight", "bias"), module[0].parameters(), strict=True)
    }
    return halves | {f"{index}.{name}": part for index in (2, 3) for name, part in module[index].named_parameters()}


def test_scalar_state_of_renamed_shards_is_left_out() -> None:
    """Scalar state has no known parameter, so the verdict lists it as not compared."""
    arguments = brought(parallelize=renamed_first, mesh={"tp": 2}, full_tensors=gathered_by_old_names)
    verdict = check_training(**arguments)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert verdict.unread == ("0.weight/step", "0.bias/step")
    assert "step of 2 parameters" in verdict.describe()

    def forgetful(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        state = optimizer.state[next(model.parameters())]
        if state["step"] == len(batches()):
            state["exp_avg"].zero_()
        return value

    assert first_divergence(check_training(**arguments, rank_step=forgetful)).tensor == "0.weight/exp_avg"


def test_a_wrong_shard_of_hand_is_seen() -> None:
    """A rank that scales its gradients is found."""

    def wrong(model: nn.Module, mesh: DeviceMesh) -> None:
        halve_first(model, mesh)
        model[0].weight.register_hook(lambda gradient: gradient * (1 + mesh.get_rank()))

    first = first_divergence(check_training(**brought(parallelize=wrong, mesh={"tp": 2}), full_tensors=gathered))
    assert (first.phase.value, first.tensor) == ("gradient", "0.weight")
    assert first.index[0] >= 3


def test_closures_and_lambdas_run() -> None:
    """Functions may be defined locally."""
    width = 5
    verdict = check_training(
        model=lambda: nn.Linear(4, width),
        parallelize=lambda model, _mesh: DistributedDataParallel(model),
        mesh={"dp": 2},
        batches=[(inputs, inputs @ torch.ones(4, width)) for inputs, _ in batches()],
        loss=lambda outputs, targets: (outputs - targets).abs().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    verdict.assert_equivalent()


def test_steps_of_their_own_may_clip_and_accumulate() -> None:
    """A user's step gets the rank's batch. Gradients are read when the optimizer steps."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = sum(loss(model(part["x"]), part["y"]) for part in batch) / len(batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return value

    parts = [[{"x": x, "y": y}, {"x": -x, "y": y}] for x, y in batches()]
    check_training(**brought(step=step, batches=parts)).assert_equivalent()


def test_microbatches_schedules_and_sums() -> None:
    """Microbatches are accumulated, schedules step, and sums cover all ranks' rows."""
    steps = [[batch, batches(2)[0]] for batch in batches()]
    verdict = check_training(
        **brought(
            batches=steps,
            reduction="sum",
            loss=lambda outputs, targets: ((outputs - targets) ** 2).sum(),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
    )
    verdict.assert_equivalent()


def test_rows_are_cut_as_users_say() -> None:
    """Axes with any name, or a function, may split rows."""
    check_training(**brought(mesh={"workers": 2}, data_axes=("workers",))).assert_equivalent()

    def alternate(batch: Any, mesh: DeviceMesh) -> Any:
        return tuple(part[mesh.get_rank() :: 2] for part in batch)

    check_training(**brought(mesh={"workers": 2}, shard=alternate)).assert_equivalent()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_what_is_asked_for(dtype: torch.dtype) -> None:
    """With `dtype=None` the model's own type sets the tolerances."""
    verdict = check_training(
        **brought(
            model=lambda: nn.Linear(4, 2, dtype=dtype),
            batches=[tuple(part.abs().to(dtype) for part in batch) for batch in batches()],
            loss=lambda outputs, targets: (outputs * targets).mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            dtype=None,
        )
    )
    assert verdict.precision == str(dtype).removeprefix("torch.")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_lower_precision_within_is_noticed() -> None:
    """A model that computes in float32 inside has float32's tolerances."""

    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(inputs).float()).double()

    assert check_training(**brought(model=Within)).precision == "float32"


def test_optimizers_that_share_state_are_read() -> None:
    """Under `ZeroRedundancyOptimizer` a rank has state only for its own parameters."""
    verdict = check_training(
        **brought(optimizer=lambda parameters: _shared(parameters) if dist.is_initialized() else adam(parameters))
    )
    verdict.assert_equivalent()


def _shared(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.01)


def test_processes_run_what_they_can_import() -> None:
    """Ranks in gloo give the same outcome."""
    verdict = check_training(**brought(), world="gloo")
    assert (verdict.outcome, verdict.world) == (Outcome.EQUIVALENT, "gloo")


def test_processes_run_closures_and_local_classes() -> None:
    """Lambdas, local modules and autograd functions are copied to gloo's ranks."""
    width = 5

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, width)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(self.linear(inputs))

    verdict = check_training(
        **brought(
            model=Local,
            parallelize=lambda model, _mesh: DistributedDataParallel(model),
            batches=[(inputs, inputs @ torch.ones(4, width)) for inputs, _ in batches()],
        ),
        world="gloo",
    )
    assert (verdict.outcome, verdict.world) == (Outcome.EQUIVALENT, "gloo"), verdict.describe()


def test_batches_may_come_from_a_data_loader() -> None:
    """A DataLoader's lists are pairs, directly and as microbatches."""
    rows = [torch.cat(parts) for parts in zip(*batches(), strict=True)]
    loader = DataLoader(TensorDataset(*rows), batch_size=4)
    plain = check_training(**brought())
    assert check_training(**brought(batches=loader)).worst_error == plain.worst_error
    check_training(**brought(batches=[[pair, pair] for pair in loader])).assert_equivalent()


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_module_stands_for_a_function_that_copies_it(world: str) -> None:
    """One device and every rank train a copy, and the module stays unchanged."""
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_training(**brought(model=model), world=world).assert_equivalent()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(tensor.dtype is torch.float32 for tensor in before.values())


def lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that calls a closure, with lists and numbers as state."""
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def test_lbfgs_evaluates_by_a_closure() -> None:
    """Ranks must give the closure the mean loss, because LBFGS decides by it."""

    def with_mean_loss(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> float:
        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model(batch[0]), batch[1])
            value.backward()
            mean = value.detach().clone()
            dist.all_reduce(mean)
            return mean / 2

        return float(optimizer.step(evaluate))

    check_training(**brought(optimizer=lbfgs), rank_step=with_mean_loss).assert_equivalent()
    assert first_divergence(check_training(**brought(optimizer=lbfgs))).tensor == "0.weight/prev_loss"
