"""Recording changes no bit on ranks of processes, and communicates nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import equivcheck
from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace
from equivcheck.scenario import Scenario
from equivcheck.strategies import scenarios
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

STEPS = 3
CPU = torch.device("cpu")


class Model(nn.Module):
    """Two linears around a norm, with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 72), nn.LayerNorm(72), nn.Linear(72, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores with shape (..., 4)."""
        scores: torch.Tensor = self.down(self.norm(torch.tanh(self.up(inputs))))
        return scores


def sequence_parallel(model: Model) -> nn.Module:
    """Tensor parallelism whose activations are sharded along dim 0 between the linears."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "up": ColwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "down": RowwiseParallel(input_layouts=Shard(0), use_local_output=True),
    }
    return parallelize_module(model, mesh, plan)  # type: ignore[arg-type]


def without_original_parameters(model: Model) -> nn.Module:
    """The optimizer sees flat parameters only."""
    return FullyShardedDataParallel(model, use_orig_params=False, device_id=CPU)


def compiled(model: Model) -> nn.Module:
    """DDP around a compiled model."""
    return DistributedDataParallel(torch.compile(model, backend="aot_eager"))


def sharded(*, reshard: bool, low: bool = False) -> Callable[[Model], nn.Module]:
    """FSDP2."""

    def wrap(model: Model) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        fully_shard(model.up, reshard_after_forward=reshard, mp_policy=policy)
        return fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)

    return wrap


LAYOUTS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "ddp, buckets are gradients": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "ddp, compiled": compiled,
    "fsdp1": lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU),
    "fsdp1, flat": without_original_parameters,
    "fsdp2": sharded(reshard=True),
    "fsdp2, kept": sharded(reshard=False),
    "fsdp2, bfloat16": sharded(reshard=True, low=True),
    "sequence parallel": sequence_parallel,
}


SCHEDULES: dict[str, type[Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def in_pipeline(schedule: type[Any]) -> Iterator[Any]:
    """Train one stage of a pipeline, with four microbatches."""
    rank, model = dist.get_rank(), Model()
    half: nn.Module = nn.Sequential(model.up, nn.Tanh()) if rank == 0 else nn.Sequential(model.norm, model.down)
    running = schedule(PipelineStage(half, rank, 2, CPU), 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(half.parameters(), lr=0.1)
    yield half
    for _ in range(STEPS):
        inputs, targets = torch.randn(8, 6), torch.randn(8, 4)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        running.step(*((inputs,) if rank == 0 else ()), target=targets if rank else None, losses=losses)
        yield from losses
        optimizer.step()


def in_layout(name: str) -> Iterator[Any]:
    """Train with two microbatches and clipping; only the last one reduces if the layout can wait."""
    model = LAYOUTS[name](Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    yield model
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            waits = getattr(model, "no_sync", nullcontext) if part == 0 and "static" not in name else nullcontext
            with waits():
                loss = nn.functional.mse_loss(model(torch.randn(8, 6)).float(), torch.randn(8, 4))
                loss.backward()
            yield loss.detach()
        clip = model.clip_grad_norm_ if isinstance(model, FullyShardedDataParallel) else None
        yield clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def num_collectives() -> int:
    """Collectives that this rank has issued in any group."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def train_on_rank(folder: Path | None, name: str) -> tuple[list[Any], int]:
    """Entry point on ranks: all values, and the number of collectives."""
    torch.manual_seed(dist.get_rank() if "parallel" not in name else 0)
    training = in_pipeline(SCHEDULES[name]) if name in SCHEDULES else in_layout(name)
    model = next(training)
    before = num_collectives()
    with nullcontext() if folder is None else equivcheck.record(folder):
        found = list(training)
    issued = num_collectives() - before
    found += model.parameters()
    found.append(torch.get_rng_state())
    local = [value.to_local() if isinstance(value, DTensor) else value for value in found]
    return [value.detach().numpy().tobytes() for value in local], issued


IN_PIPELINES = pytest.mark.torch(">=2.10", "over gloo, the pipeline aborts in torch 2.9, without a recording as well")


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=IN_PIPELINES) for name in SCHEDULES)])
def test_no_bit_changes_in_torch_layouts(name: str, tmp_path: Path) -> None:
    """And no collective is added. Each rank has the gradients of its parameters in each step."""
    before, after = (ranks("gloo", 2).run(train_on_rank, folder, name).values for folder in (None, tmp_path))
    assert before == after
    for trace in read_trace(tmp_path):
        assert [each.step for each in trace.steps] == [*range(STEPS)]
        for each in trace.steps:
            names = {entry.moment: set[str]() for entry in each.entries}
            for entry in each.entries:
                names[entry.moment].add(entry.piece.name)
            assert names[Moment.GRADIENT] == names[Moment.UPDATE] > set()


def recorded_scenario(folder: Path | None, scenario: Scenario) -> tuple[Any, int]:
    """Entry point on ranks: the trace of all values, and the number of collectives."""
    before = num_collectives()
    with nullcontext() if folder is None else equivcheck.record(folder):
        trace = rank_program(scenario)
    return trace, num_collectives() - before


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if dataclasses.is_dataclass(one):
        return all(is_same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other)


@pytest.mark.parametrize("layout", layout_kinds())
def test_no_bit_changes_in_generated_trainings(layout: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All values of each rank are the same, or its error, with all options of the layout, and no collective is added."""

    def outcome_of(scenario: Scenario, folder: Path | None) -> Any:
        try:
            return ranks("gloo", scenario.layout.mesh.num_ranks).run(recorded_scenario, folder, scenario).values
        except RanksFailed as error:
            return str(error)

    @settings(max_examples=max(2, settings().max_examples // 50), deadline=None, phases=(Phase.explicit, Phase.generate))
    @given(scenarios(layouts=(layout,), max_ranks=4).filter(lambda each: limit_reason(each.training, each.layout) is None))
    def unchanged(scenario: Scenario) -> None:
        assert is_same(outcome_of(scenario, None), outcome_of(scenario, tmp_path_factory.mktemp("trace")))

    unchanged()
