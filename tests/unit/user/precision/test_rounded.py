"""One device rounds like the ranks, so several steps in low precision are compared exactly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import MixedPrecision as FlatMixedPrecision
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import Outcome, check_training
from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.user.precision.run import RoundedRun, exact_task
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence
from unit.user.programs import batches, brought, in_ddp, task_of

STEPS = 4
AUTOCAST = LowPrecision.BFLOAT16
REDUCED_WIDELY = MixedPrecision(param=ElementType.BFLOAT16, reduce=ElementType.FLOAT32)
REDUCED_LOW = MixedPrecision(param=ElementType.BFLOAT16, reduce=ElementType.BFLOAT16)
OUTPUT_WIDE = MixedPrecision(param=ElementType.BFLOAT16, reduce=ElementType.FLOAT32, output=ElementType.FLOAT32)


class Model(nn.Module):
    """Layers with a norm in float32, and a buffer that nothing casts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("offset", torch.linspace(-1.0, 1.0, 16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call every layer once."""
        hidden = self.second(torch.tanh(self.first(inputs)) + self.offset)
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        outputs: torch.Tensor = self.head(self.scale * normed.to(hidden.dtype))
        return outputs


def fully_sharded(policy: MixedPrecision) -> Callable[[nn.Module, DeviceMesh], None]:
    """FSDP2 on each layer and on the model, with the same policy."""
    param, reduce, output = (
        None if kind is None else getattr(torch, kind.value) for kind in (policy.param, policy.reduce, policy.output)
    )

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        for layer in (model.first, model.second, model.head):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param, reduce, output))

    return shard


def flat_sharded(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """FSDP1 on the model."""
    kinds = FlatMixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=kinds)


def untouched(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Leave gradients unreduced."""


def wide_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over rows in the targets' type."""
    return nn.functional.mse_loss(outputs.to(targets.dtype), targets)


def rounding(**changes: Any) -> dict[str, Any]:
    """Arguments with a model and a batch for all meshes in these tests."""
    return brought(model=Model, batches=batches(12, STEPS), loss=wide_loss, **changes)


HONEST: dict[str, dict[str, Any]] = {
    "ddp autocast": {"parallelize": in_ddp, "precision": AUTOCAST, "dtype": torch.float32},
    "ddp autocast 3": {"parallelize": in_ddp, "precision": AUTOCAST, "dtype": torch.float32, "mesh": {"dp": 3}},
    "fsdp2": {"parallelize": fully_sharded(REDUCED_WIDELY), "precision": REDUCED_WIDELY},
    "fsdp2 float32": {"parallelize": fully_sharded(REDUCED_WIDELY), "precision": REDUCED_WIDELY, "dtype": torch.float32},
    "fsdp2 3 low": {"parallelize": fully_sharded(REDUCED_LOW), "precision": REDUCED_LOW, "mesh": {"dp": 3}},
    "fsdp2 output": {"parallelize": fully_sharded(OUTPUT_WIDE), "precision": OUTPUT_WIDE},
    "hsdp": {
        "parallelize": fully_sharded(REDUCED_LOW),
        "precision": REDUCED_LOW,
        "mesh": {"dp_replicate": 2, "dp_shard": 2},
        "dtype": torch.float32,
    },
    "pure bfloat16": {"parallelize": in_ddp, "precision": REDUCED_LOW, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("arguments", HONEST.values(), ids=HONEST)
def test_several_steps_in_few_digits_are_equivalent(arguments: dict[str, Any]) -> None:
    """Ranks agree at every step within float32's tolerances or narrower."""
    verdict = check_training(**rounding(**arguments))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert "bfloat16" in verdict.precision
    assert verdict.notes == ()


def test_a_flat_shard_rounds_alike() -> None:
    """FSDP1 casts only its root's inputs."""
    arguments = rounding(parallelize=flat_sharded, precision=REDUCED_WIDELY)
    arguments["model"] = lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    check_training(**arguments).assert_equivalent()


BUGS: dict[str, dict[str, Any]] = {
    "reduced in bfloat16": {"parallelize": fully_sharded(REDUCED_LOW), "precision": REDUCED_WIDELY},
    "reduced in bfloat16, float32": {
        "parallelize": fully_sharded(REDUCED_LOW),
        "precision": REDUCED_WIDELY,
        "dtype": torch.float32,
    },
    "not reduced": {"parallelize": untouched, "precision": AUTOCAST, "dtype": torch.float32},
}


@pytest.mark.parametrize("arguments", BUGS.values(), ids=BUGS)
def test_wrong_reductions_are_found_at_once(arguments: dict[str, Any]) -> None:
    """A missing reduction, or one in another type, shows in the first gradients."""
    first = first_divergence(check_training(**rounding(**arguments)))
    assert (first.step, first.phase) == (0, Phase.GRADIENT)


def deep() -> nn.Module:
    """A model with enough parameters that some round differently after a perturbation."""
    inner = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 64), *inner, nn.Linear(64, 2))


def test_first_gradients_are_told_in_units_of_float32() -> None:
    """Ranks, and the copies that measure noise, start from equal bits."""
    task = task_of(model=deep, loss=wide_loss, precision=REDUCED_WIDELY, dtype=torch.float32)
    run = RoundedRun(task, SingleDeviceRun(exact_task(task)), ())
    gradients = [moment for moment in run.confirming_reference(None).moments if moment.phase is Phase.GRADIENT]
    assert (gradients[0].tolerances < 1e-5 * gradients[0].scales).all()
    assert (gradients[1].tolerances > 1e-5 * gradients[1].scales).any()


def test_another_policy_than_said_is_noted() -> None:
    """If ranks differ, a note compares their policy with the given one."""
    verdict = check_training(**rounding(parallelize=fully_sharded(REDUCED_LOW), precision=REDUCED_WIDELY))
    assert verdict.notes == (f"precision is {REDUCED_WIDELY!r}, but your ranks use {REDUCED_LOW!r}",)


def autocast_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Forward in low precision, then clipping."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch[0])
    value: torch.Tensor = loss(outputs.float(), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return value


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"parallelize": fully_sharded(REDUCED_WIDELY)}, f"try precision={REDUCED_WIDELY!r}, so"),
        ({"parallelize": in_ddp, "rank_step": autocast_step, "dtype": torch.float32}, f"precision={AUTOCAST!r} and dtype="),
    ],
    ids=["fsdp2", "autocast"],
)
def test_what_rounds_unannounced_is_told_of_the_argument(arguments: dict[str, Any], told: str) -> None:
    """If ranks round and differ, the note contains the argument as code."""
    verdict = check_training(**rounding(**arguments))
    assert verdict.outcome is Outcome.DIVERGED, verdict.describe()
    assert any(told in note for note in verdict.notes), verdict.notes


def own_loss(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> float:
    """Train on two microbatches with a custom loss, which also uses outputs and parameters directly."""
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in batch:
        outputs, penalty = model(inputs), next(model.parameters()).pow(2).sum()
        value = nn.functional.mse_loss(outputs, targets) + 0.1 * outputs.pow(2).mean() + 0.01 * penalty
        (value / 2).backward()
        total += value.item() / 2
    optimizer.step()
    return total


def several_losses(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Two forward passes before one backward."""
    optimizer.zero_grad()
    first, second = model(batch[0][0]), model(batch[1][0])
    value: torch.Tensor = loss(first, batch[0][1]) + loss(second, batch[1][1])
    value.backward()
    optimizer.step()
    return value


@pytest.mark.parametrize("step", [own_loss, several_losses])
def test_steps_of_users_mean_the_same_by_parts(step: Any) -> None:
    """Gradients equal the full batch's for any use of the joined outputs."""
    two = list(zip(batches(12, STEPS), batches(12, STEPS)[::-1], strict=True))
    exact = MixedPrecision(reduce=ElementType.FLOAT64)
    verdict = check_training(**rounding(precision=exact, step=step) | {"batches": [list(pair) for pair in two]})
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_of_users_that_autocasts_is_equivalent(ranks: int) -> None:
    """A step with autocast, a wide loss and clipping is equivalent on any number of ranks."""
    arguments = rounding(step=autocast_step, precision=AUTOCAST, dtype=torch.float32, mesh={"dp": ranks})
    check_training(**arguments | {"batches": batches(12, 2)}).assert_equivalent()


def test_sums_over_rows_are_scaled_as_on_ranks() -> None:
    """A sum is multiplied by the number of ranks, also over parts."""

    def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).pow(2).sum()

    arguments = rounding(parallelize=fully_sharded(REDUCED_WIDELY), precision=REDUCED_WIDELY, reduction="sum")
    check_training(**arguments | {"loss": summed}).assert_equivalent()


def test_what_is_no_mean_over_rows_is_no_pass() -> None:
    """One device over parts makes the same mistake as the ranks, so agreement is inconclusive."""

    def over_own_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        counts = targets[:, 0] > 0
        return ((outputs - targets).pow(2).mean(-1) * counts).sum() / counts.sum()

    arguments = rounding(parallelize=fully_sharded(REDUCED_WIDELY), precision=REDUCED_WIDELY)
    verdict = check_training(**arguments | {"loss": over_own_rows})
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "not a mean over rows: one device" in verdict.reason


class Towers(nn.Module):
    """Two encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(2, 8)

    def forward(self, queries: torch.Tensor, candidates: torch.Tensor) -> Any:
        """Encode both sides."""
        return torch.tanh(self.left(queries)), torch.tanh(self.right(candidates))


def contrastive(outputs: Any, _targets: torch.Tensor, *, gather: Callable[[torch.Tensor], Any] = all_gather) -> torch.Tensor:
    """Find each query's candidate among the candidates of all ranks."""
    queries, candidates = (each.float() for each in outputs)
    first = 0
    if dist.is_initialized():
        first, candidates = dist.get_rank() * len(queries), torch.cat(tuple(gather(candidates)))
    return nn.functional.cross_entropy(queries @ candidates.T, torch.arange(first, first + len(queries)))


def gathered_without_gradient(candidates: torch.Tensor) -> list[torch.Tensor]:
    """Gather as many losses do by mistake: only the own candidates have a gradient."""
    found = [torch.empty_like(candidates) for _ in range(dist.get_world_size())]
    dist.all_gather(found, candidates.detach())
    found[dist.get_rank()] = candidates
    return found


def sharded_towers(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on the model."""
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@pytest.mark.parametrize(
    ("loss", "outcome"),
    [
        (contrastive, Outcome.INCONCLUSIVE),
        (partial(contrastive, gather=gathered_without_gradient), Outcome.DIVERGED),
    ],
    ids=["right", "wrong"],
)
def test_losses_over_the_rows_of_all_ranks_are_compared_with_the_full_batch(loss: Any, outcome: Outcome) -> None:
    """One device in parts is no reference for a loss that gathers, so right ranks do not diverge from it."""
    arguments = rounding(parallelize=sharded_towers, precision=REDUCED_WIDELY, dtype=torch.float32)
    given = [((queries, candidates), torch.zeros(len(queries))) for queries, candidates in batches(8, 2)]
    verdict = check_training(**arguments | {"model": Towers, "batches": given, "loss": loss})
    assert verdict.outcome is outcome, verdict.describe()
    assert (outcome is Outcome.DIVERGED) != ("agree with the full batch" in verdict.reason)


class Reading(nn.Module):
    """A layer that reads an encoder's output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Add a gated product."""
        return inputs + torch.tanh(self.keys(memory)) * self.values(memory)


class Decoder(nn.Module):
    """A block that has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Reading(), Reading()

    def forward(self, inputs: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Read the memory in two layers."""
        return self.second(self.first(inputs, memory), memory)  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    """Blocks that read the same activation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 16), nn.Linear(16, 2)
        self.blocks = nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Each block reads the memory by keyword."""
        hidden = memory = torch.tanh(self.encoder(inputs))
        for block in self.blocks:
            hidden = block(hidden, memory=memory)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def units_that_share(model: nn.Module, mesh: DeviceMesh, *, reduce: torch.dtype = torch.float32) -> None:
    """FSDP2 on each layer, each block, and the model."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    for block in model.blocks:
        for unit in (block.first, block.second, block):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def test_units_that_read_one_activation_add_its_gradients_unit_by_unit() -> None:
    """FSDP2 adds gradients inside each unit first. A reduction in bfloat16 still shows in units of float32."""
    arguments = rounding(parallelize=units_that_share, precision=REDUCED_WIDELY, dtype=torch.float32)
    verdict = check_training(**arguments | {"model": EncoderDecoder})
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    first = first_divergence(
        check_training(**arguments | {"model": EncoderDecoder, "parallelize": partial(units_that_share, reduce=torch.bfloat16)})
    )
    assert (first.step, first.phase) == (0, Phase.GRADIENT)


class Outputs(OrderedDict[str, Any]):
    """Named outputs, as some libraries return them."""

    @property
    def values_of_rows(self) -> torch.Tensor:
        """Values for the loss."""
        found: torch.Tensor = self["values_of_rows"]
        return found


class Naming(Model):
    """A model that returns an object with a mean over rows."""

    def forward(self, inputs: torch.Tensor) -> Any:
        """Return named outputs."""
        outputs = super().forward(inputs)
        return Outputs(values_of_rows=outputs, level=outputs.mean(), words=("nothing",))


def named_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
    """A step that reads outputs by name."""
    optimizer.zero_grad()
    outputs = model(batch[0])
    value: torch.Tensor = nn.functional.mse_loss(outputs.values_of_rows, batch[1]) + 0.1 * outputs["level"]
    value.backward()
    optimizer.step()
    return value


def test_outputs_keep_their_types_by_parts() -> None:
    """Dict subclasses keep their type, and scalar means are averaged."""
    exact = MixedPrecision(reduce=ElementType.FLOAT64, output=ElementType.FLOAT64)
    check_training(**rounding(precision=exact, step=named_step) | {"model": Naming}).assert_equivalent()


def over_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 over two tensor-parallel layers."""
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "head": RowwiseParallel()})
    fully_sharded(REDUCED_WIDELY)(model, mesh["dp"])


def test_sums_that_no_device_has_are_told_by_wider_tolerances() -> None:
    """Correct tensor-parallel ranks never diverge, and a missing reduction does."""

    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(first=nn.Linear(4, 16), second=nn.Identity(), head=nn.Linear(16, 2)))

    arguments = rounding(parallelize=over_tensor_parallelism, precision=REDUCED_WIDELY, mesh={"dp": 2, "tp": 2})
    arguments |= {"model": build, "batches": batches(12, 2)}
    honest = check_training(**arguments)
    assert honest.outcome is Outcome.EQUIVALENT, honest.describe()
    assert check_training(**arguments | {"parallelize": untouched}).outcome is Outcome.DIVERGED


def test_a_policy_of_the_type_that_parameters_have_rounds_nothing() -> None:
    """Such a policy causes neither a difference nor a note."""

    def wrong(model: nn.Module, mesh: DeviceMesh) -> None:
        model[3].register_forward_hook(lambda _module, _inputs, outputs: outputs * 1.1)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64))

    verdict = check_training(**brought(parallelize=wrong, explain=False))
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.notes == ()
