"""Notes about the run, and compiled trainings in gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import Outcome, check_training
from equivcheck.user.messages.notes import COMPILED, NOT_PARALLEL, ONE_RANK
from equivcheck.user.ranks import process_trace
from equivcheck.user.task import Task
from equivcheck.worlds.pool import ranks
from unit.user.programs import batches, brought, in_ddp, said, task_of
from unit.user.test_equivalent import gathered, halve_first, in_fsdp2, in_tp


def unchanged(model: nn.Module, mesh: DeviceMesh) -> None:
    """Return the model unchanged."""


@pytest.mark.parametrize(
    ("parallelize", "mesh", "notes"),
    [
        (unchanged, {"tp": 2}, (NOT_PARALLEL,)),
        (unchanged, {"dp": 2}, (NOT_PARALLEL,)),
        (unchanged, {"dp": 1}, (ONE_RANK,)),
        (in_ddp, {"dp": 2}, ()),
        (in_fsdp2, {"dp_replicate": 1, "dp_shard": 2}, ()),
        (in_tp, {"tp": 2}, ()),
    ],
)
def test_what_is_not_parallel_is_noted(parallelize: Callable[..., Any], mesh: dict[str, int], notes: tuple[str, ...]) -> None:
    """Ranks without communication or shards get a note, whatever the outcome."""
    verdict = check_training(**brought(parallelize=parallelize, mesh=mesh))
    assert verdict.notes == notes
    assert ("is the model parallel at all?" in said(verdict)) is (NOT_PARALLEL in notes)


def test_a_forgotten_wrapper_is_noted() -> None:
    """DDP communicates when it is built, but a model without it does not communicate in steps."""

    def forgetful(model: nn.Module, mesh: DeviceMesh) -> None:
        in_ddp(model, mesh)

    assert check_training(**brought(parallelize=forgetful)).notes == (NOT_PARALLEL,)


def test_reading_is_no_sign_of_a_parallel_model() -> None:
    """Collectives in `full_tensors` do not count; collectives in forward do."""

    def reading(module: nn.Module) -> dict[str, torch.Tensor]:
        dist.barrier()
        return dict(module.named_parameters())

    arguments = brought(mesh={"tp": 2})
    assert check_training(**arguments | {"parallelize": unchanged}, full_tensors=reading).notes == (NOT_PARALLEL,)
    assert check_training(**arguments | {"parallelize": halve_first}, full_tensors=gathered).notes == ()


def compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Compile a model in `DistributedDataParallel`."""
    return torch.compile(in_ddp(model, mesh), backend="aot_eager")


@pytest.mark.slow
def test_what_is_compiled_runs_in_gloo() -> None:
    """Simulated ranks refuse it, processes run it, and a note says so."""
    verdict = check_training(**brought(parallelize=compiled))
    assert (verdict.outcome, verdict.world) == (Outcome.EQUIVALENT, "gloo"), verdict.describe()
    assert verdict.notes == (COMPILED,)
    assert f"note: {COMPILED}" in said(verdict)


def test_what_is_compiled_and_fails_says_where_it_ran() -> None:
    """An exception in compiled code names gloo as its world."""

    def failing(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = compiled(model, mesh)
        module.register_forward_hook(lambda *_: 1 // 0)
        return module

    verdict = check_training(**brought(parallelize=failing, batches=batches(steps=1)))
    assert (verdict.outcome, verdict.world, verdict.notes) == (Outcome.CRASHED, "gloo", (COMPILED,))
    assert "ZeroDivisionError" in verdict.describe()


@pytest.mark.slow
def test_processes_keep_nothing_that_is_compiled() -> None:
    """Each training compiles again because Dynamo limits recompilations per function."""
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def num_graphs(task: Task, times: int) -> list[int]:
        with torch._dynamo.config.patch(recompile_limit=1):
            return [process_trace(task) and len(graphs) for _ in range(times)]

    task = task_of(parallelize=lambda model, mesh: in_ddp(torch.compile(model, backend=counting), mesh))
    for counts in ranks("gloo", 2).run(num_graphs, task, 3).values:
        assert counts == [counts[0], 2 * counts[0], 3 * counts[0]]
        assert counts[0] > 0
