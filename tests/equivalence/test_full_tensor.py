"""What `DTensor.full_tensor` gives is held against the tensors that the oracle puts together itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equivcheck import Outcome, check
from equivcheck.diagnosis.explain import explained
from equivcheck.layouts.composition.full_tensors import FULL_TENSORS_ONE_IN, asks_full_tensors
from equivcheck.layouts.composition.running import read_full_tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    Axis,
    Data,
    ElementType,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    MixedPrecision,
    Model,
    Precision,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.training.setup import Setup
from equivcheck.worlds.sim import ranks as sim_ranks
from equivcheck.worlds.sim.ranks import SimRanks
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.stage import Stage
from support.verdicts import first_divergence


def scenario(seed: int = 0, microbatches: tuple[int, ...] = (4,)) -> Scenario:
    """A column of five rows under tensor parallelism and `fully_shard`, so that dim 0 is cut twice and not evenly."""
    return Scenario(
        training=Training(
            model=Model(features=2, layers=(Layer(width=5),)), data=Data(microbatches=microbatches), steps=2, seed=seed
        ),
        layout=Layout(
            mesh=Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2))),
            parallelisms=(TensorParallel(plan=(LayerPlan(split=Split.COLWISE),)), FSDP2()),
        ),
    )


CHOSEN = next(seed for seed in range(100) if asks_full_tensors(scenario(seed)))
PASSED_OVER = next(seed for seed in range(100) if not asks_full_tensors(scenario(seed)))


FULL_TENSORS = pytest.mark.torch(">=2.10", "before, full_tensor() is wrong by itself where ranks cut a dim twice")


def rolled_on(rank: int) -> Callable[[DTensor], torch.Tensor]:
    """A `full_tensor` that returns rows in another order on one rank."""
    original = DTensor.full_tensor

    def full_tensor(tensor: DTensor, **options: Any) -> torch.Tensor:
        full = original(tensor, **options)
        return full.roll(1, 0) if dist.get_rank() == rank else full

    return full_tensor


@FULL_TENSORS
def test_a_tensor_that_is_read_otherwise_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict names the gradient of the last step, the rank and both values, and says that the shards are right."""
    monkeypatch.setattr(DTensor, "full_tensor", rolled_on(2))
    verdict = check(scenario(CHOSEN))

    first = first_divergence(verdict)
    assert (first.step, first.phase, first.rank) == (1, Phase.GRADIENT, 2)
    assert first.difference is Difference.FULL_TENSOR
    assert "on rank 2: full_tensor() returns" in verdict.reason
    told = explained(verdict)
    assert told.diagnosis is not None
    assert told.diagnosis.cause is Cause.READ_BY_TORCH


def test_values_that_are_not_finite_are_read_alike() -> None:
    """A training that overflows has no tolerance, and needs none where both readings are the same."""
    training = Training(
        model=Model(features=2, layers=(Layer(width=5),)),
        data=Data(microbatches=(4,)),
        optimizer=SGD(lr=1e30),
        precision=Precision.FLOAT32,
        steps=2,
    )
    layout = Layout(
        mesh=Mesh(axes=(Axis(name="dp", size=2),)),
        parallelisms=(FSDP2(mixed_precision=MixedPrecision(param=ElementType.FLOAT16)),),
    )
    overflows = (Scenario(training=replace(training, seed=seed), layout=layout) for seed in range(100))

    verdict = check(next(filter(asks_full_tensors, overflows)))

    assert (verdict.outcome, verdict.undecided != "") == (Outcome.EQUIVALENT, True)


@FULL_TENSORS
@pytest.mark.parametrize("seed", range(12))
def test_only_some_checks_read_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ones, the training's seed says, whatever else a scenario is made of."""
    monkeypatch.setattr(DTensor, "full_tensor", rolled_on(0))
    found: Verdict = check(scenario(seed))

    assert (found.outcome is Outcome.DIVERGED) == asks_full_tensors(scenario(seed, (2, 2)))


def test_a_share_of_all_seeds_is_chosen() -> None:
    """About one in eight."""
    chosen = sum(asks_full_tensors(scenario(seed)) for seed in range(4000))
    assert 0.8 < chosen / 4000 * FULL_TENSORS_ONE_IN < 1.2


def test_reading_is_no_part_of_the_training() -> None:
    """Calls of the training are those that are expected, with the reading and without."""
    verdicts = [check(scenario(seed)) for seed in (CHOSEN, PASSED_OVER)]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.EQUIVALENT] * 2
    with_it, without = ([call for call in verdict.calls[0] if call.stage is Stage.READING] for verdict in verdicts)
    assert len(with_it) > len(without)


@FULL_TENSORS
def test_what_ranks_shared_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks take each other's plans of redistribution, as all did before their meshes differed, the check fails."""
    with SimRanks(4) as members:
        monkeypatch.setattr(sim_ranks, "per_thread_meshes", contextlib.nullcontext)
        assert check(scenario(CHOSEN), world=members).outcome.is_finding


def test_a_gradient_that_one_rank_lacks_is_missing_and_no_hang() -> None:
    """Ranks ask for the full tensors of what all of them have."""

    def lose(setup: Setup) -> None:
        read_full_tensors(setup)

        def forget(optimizer: torch.optim.Optimizer, _step: int) -> None:
            if dist.get_rank() == 1:
                optimizer.param_groups[0]["params"][0].grad = None

        setup.before_update.append(forget)

    assert first_divergence(check(scenario(), alter=lose)).difference is Difference.MISSING


def test_layouts_without_dtensors_have_nothing_to_read() -> None:
    """Plain tensors are not asked for a full tensor."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),))
    assert check(Scenario(training=scenario(CHOSEN).training, layout=layout)).outcome is Outcome.EQUIVALENT
