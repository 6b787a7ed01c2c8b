"""Emulated ranks match the single-device run unless a counterfactual changes them."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from equivcheck import Scenario
from equivcheck.diagnosis.diverged_run import DivergedRun, run_again
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.held_elements import HeldElements, held_elements
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.evidence import RankCoordinate, axis_combinations
from equivcheck.diagnosis.mistake import Span
from equivcheck.diagnosis.mistakes.reductions import keep_unreduced, reduce_by
from equivcheck.layouts.base.rounding import EACH, ONCE, WHOLE, WhenReduced
from equivcheck.layouts.composition.registry import when_reduced
from equivcheck.oracle.comparison.compare import compare
from equivcheck.scenario import DDP, FSDP1, FSDP2, Replicate, Replicator, ShardingStrategy
from support.supported import require_supported
from unit.diagnosis import faults
from unit.diagnosis.causes import on_2, over
from unit.diagnosis.faults import LAYOUTS, ON_DDP, ON_FSDP2

THREE_TIMES = faults.gradients(lambda values: values.mul_(3.0))


def diverged(scenario: Scenario) -> DivergedRun:
    """A run whose gradients are three times too large."""
    found = run_again(scenario, THREE_TIMES, "sim")
    assert found is not None
    return found


@pytest.mark.parametrize("scenario", LAYOUTS, ids=[f"{number} {at.name}" for number, at in enumerate(LAYOUTS)])
def test_emulated_ranks_compute_what_one_device_does(scenario: Scenario) -> None:
    """The layout and the real ranks' values do not matter."""
    require_supported(scenario)
    run = diverged(scenario)

    traces = ScenarioRanks(run, own_rows=True).train(scenario.training.steps)
    (trace,) = ScenarioRanks(run, own_rows=False, one=True).train(scenario.training.steps)

    assert len(traces) == scenario.layout.mesh.num_ranks
    assert compare(run.reference, traces).divergences == ()
    assert compare(run.reference, [trace]).divergences == ()


@pytest.mark.parametrize("when", [EACH, WHOLE, ONCE])
def test_when_gradients_are_reduced_does_not_matter_to_the_mean(when: WhenReduced) -> None:
    """`EACH`, `WHOLE` and `ONCE` give the same average, because averaging is linear."""
    run = diverged(ON_DDP)
    ranks = ScenarioRanks(run, own_rows=True)
    ranks.when = when

    assert compare(run.reference, ranks.train(2)).divergences == ()


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        (reduce_by(keep_unreduced, None, Span(first=0), (0,)), 4),
        (reduce_by(keep_unreduced, {"layers.1.linear.bias": torch.tensor(data=True)}, Span(first=0)), 1),
        (lambda ranks: setattr(ranks, "loss_weights", (2.0, 1.0)), 4),
        (lambda ranks: ranks.after_backward.append(lambda rank, _step: ranks.gradients(rank)["layers.0.linear.bias"].zero_()), 1),
    ],
    ids=["a microbatch unreduced", "a tensor unreduced", "weighted", "changed after backward"],
)
def test_what_is_changed_shows_in_the_gradients_that_it_concerns(change: Callable[[EmulatedRanks], None], tensors: int) -> None:
    """Only the first step counts, because later steps follow from it."""
    run = diverged(ON_DDP)
    ranks = ScenarioRanks(run, own_rows=True)
    change(ranks)

    found = compare(run.reference, ranks.train(2)).divergences

    assert len({each.tensor for each in found if (each.step, each.phase.value) == (0, "gradient")}) == tensors


def test_a_rank_takes_elements_that_it_does_not_hold_from_one_that_does() -> None:
    """Two shards with five rows give the full tensor on each rank."""
    held = held_elements(diverged(ON_FSDP2))
    name = "layers.0.linear.weight"
    mine, others = held.by(name, 0), held.by(name, 1)
    tensors = [{name: torch.full(mine.shape, float(rank))} for rank in range(2)]

    held.gather(tensors)

    assert held.is_sharded
    assert not (mine & others).any()
    assert held.by(name, 0, 1).all()
    assert all(torch.equal(each[name], others.double().float()) for each in tensors)


def test_an_exchange_gives_each_rank_the_elements_of_another() -> None:
    """Two exchanges restore the values."""
    held = held_elements(diverged(ON_FSDP2))
    name = "layers.0.linear.weight"
    value = held.by(name, 1).float()

    held.exchange(name, value, [1, 0])

    assert torch.equal(value, held.by(name, 0).float())


@pytest.mark.parametrize("axes", [("replicate", "shard", "tp"), ("shard", "replicate", "tp")])
def test_replicas_read_the_same_elements(axes: tuple[str, ...]) -> None:
    """If the tp ranks did not split a tensor, the shards of the first half would be read by all, once for each replica."""
    places = [dict(zip(axes, place, strict=True)) for place in product(range(2), repeat=3)]
    coordinates = [RankCoordinate(rank=rank, indices=place) for rank, place in enumerate(places)]
    masks = [np.arange(4) == 2 * place["tp"] + place["shard"] for place in places]
    value = torch.arange(4.0)

    held = HeldElements(coordinates, {"weight": masks}, {})
    held.take_unsplit("weight", value, ("tp",))

    assert value.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert [held.are_split("weight", (axis,)) for axis in axes] == [axis != "replicate" for axis in axes]


def test_peers_differ_along_the_given_axes_only() -> None:
    """In a 2 x 2 mesh, rank 1 is at (0, 1)."""
    ranks = diverged(over({"dp_replicate": 2, "dp_shard": 2}, FSDP2())).coordinates

    assert ranks[1].indices == {"dp_replicate": 0, "dp_shard": 1}
    assert [other.rank for other in ranks if other.differs_only_along(ranks[1], ("dp_replicate",))] == [1, 3]
    assert list(axis_combinations(("dp", "tp"))) == [("dp", "tp"), ("dp",), ("tp",)]


@pytest.mark.parametrize(
    ("scenario", "when"),
    [
        (on_2(DDP()), WHOLE),
        (on_2(DDP(no_sync=True)), ONCE),
        (on_2(Replicate(implementation=Replicator.DDP)), WHOLE),
        (on_2(Replicate(implementation=Replicator.FSDP)), EACH),
        (on_2(FSDP1()), EACH),
        (on_2(FSDP1(strategy=ShardingStrategy.NO_SHARD)), WHOLE),
        (on_2(FSDP2()), EACH),
        (on_2(FSDP2(no_sync=True)), WhenReduced(once=True)),
    ],
    ids=lambda value: value.layout.name if isinstance(value, Scenario) else f"{value.once} {value.whole}",
)
def test_when_a_layout_reduces(scenario: Scenario, when: WhenReduced) -> None:
    """DDP keeps full gradients; so does FSDP if it shards nothing."""
    assert when_reduced(scenario.layout) == when
