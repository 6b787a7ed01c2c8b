"""Isolation: whatever a program of a user does to the state of torch and Python, the next run is as in a fresh process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equivcheck import check_training
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import LOCAL_WORLDS, ranks
from isolation.fixed import of_fresh_process, results
from isolation.mutations import MUTATIONS, looks, mutate


def seen(world: str) -> dict[tuple[str, str], str]:
    """What looks show in this process and on each rank."""
    places = {"here": looks(), **{f"rank {rank}": shown for rank, shown in enumerate(ranks(world, 2).run(looks).values)}}
    return {(place, name): shown for place, shown_there in places.items() for name, shown in shown_there.items()}


def changes(before: dict[tuple[str, str], str], after: dict[tuple[str, str], str]) -> dict[tuple[str, str], tuple[str, str]]:
    """What is seen otherwise, and nothing else: an entry by name, not a table that has a hundred."""
    return {look: (shown, after[look]) for look, shown in before.items() if after[look] != shown}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("world", LOCAL_WORLDS)
def test_a_change_ends_with_its_run(world: str, name: str) -> None:
    """After a program that has changed something on all ranks, neither this process nor any rank shows it."""
    before = seen(world)
    ranks(world, 2).run(mutate, (name,), "returns")
    assert not changes(before, seen(world))


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_change_shows_while_its_run_lasts(name: str) -> None:
    """A look tells a process with the change from one without: else the test above could not fail."""
    members = ranks("sim", 2)
    before, after = (members.run(program, name).values for program in (seen_by_rank, changed))
    assert after[1] != before[1]


def changed(name: str) -> str:
    """What a rank sees of a change that it makes."""
    mutate((name,), "returns")
    return seen_by_rank(name)


def seen_by_rank(name: str) -> str:
    """What a rank sees without."""
    return repr(MUTATIONS[name].look())


@pytest.mark.parametrize("world", [pytest.param(each, marks=pytest.mark.slow if each == "gloo" else ()) for each in LOCAL_WORLDS])
@given(data=st.data())
@settings(max_examples=3)
def test_the_next_check_is_as_in_a_fresh_process(world: str, data: st.DataObject) -> None:
    """After all changes in any order, by programs that return or raise, verdicts and bits are those of a fresh process."""
    before = seen(world)
    names, size = data.draw(st.permutations(sorted(MUTATIONS))), data.draw(st.integers(5, 20))
    for start in range(0, len(names), size):
        with contextlib.suppress(RanksFailed):
            ranks(world, 2).run(mutate, tuple(names[start : start + size]), data.draw(st.sampled_from(("returns", "raises"))))
    assert results(world) == of_fresh_process(world)
    assert not changes(before, seen(world))


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """A user's step that changes what does not change what it computes."""
    mutate(("environment", "random", "anomaly detection", "view replay", "number of threads"), "returns")
    optimizer.zero_grad()
    found: torch.Tensor = loss(model(batch[0]), batch[1])
    found.backward()
    optimizer.step()
    return found


def test_the_run_on_one_device_leaves_no_change() -> None:
    """What a user's training changes in this process, where it runs on one device, ends with the check."""
    before = looks()
    verdict = check_training(
        model=lambda: nn.Linear(2, 2),
        parallelize=lambda model, mesh: nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group()),
        mesh={"dp": 2},
        batches=[(torch.eye(2), torch.ones(2, 2))],
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        step=step,
    )
    verdict.assert_equivalent()
    assert looks() == before
