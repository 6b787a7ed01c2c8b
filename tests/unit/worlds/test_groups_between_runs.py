"""A program's own groups, and reused group names, do not affect later runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import LOCAL_WORLDS, open_ranks
from equivcheck.worlds.ranks import Ranks

DEADLINE = 20.0
SECONDS_TO_LOOK_IN_VAIN = 1.0


@pytest.fixture(scope="module", params=LOCAL_WORLDS)
def members(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks kept between runs."""
    with open_ranks(request.param, 2) as opened:
        yield opened


def group_of_one_by_itself() -> None:
    """Only rank 0 creates a group."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def group_of_one() -> None:
    """All ranks create a group with only rank 0 in it."""
    dist.new_group([0])


def group_of_all_but_for_an_error() -> None:
    """A rank raises before it has created the group that the other creates."""
    if dist.get_rank() == 0:
        raise ValueError
    dist.new_group([0, 1])


def group_by_its_members(late: int | None = None, destroy: bool = False) -> float:
    """Sum over a group that torch names by its ranks and the rank's group count; one rank may come late."""
    time.sleep(SECONDS_TO_LOOK_IN_VAIN if dist.get_rank() == late else 0.0)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    values = torch.ones(())
    dist.all_reduce(values, group=group)
    if destroy:
        dist.destroy_process_group(group)
    return values.item()


@pytest.mark.parametrize("program", [group_of_one_by_itself, group_of_one, group_of_all_but_for_an_error])
def test_ranks_with_unequal_numbers_of_groups_are_not_kept(members: Ranks, program: Callable[[], None]) -> None:
    """Each would wait in a group with another name."""
    with contextlib.suppress(RanksFailed):
        members.run(program)
    assert members.run(group_by_its_members, deadline=DEADLINE).values == (2.0, 2.0)


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_group_does_not_look_for_the_members_of_one_of_its_name_in_a_run_before(members: Ranks, late: int) -> None:
    """A rank that comes first must not find keys of a destroyed group with the same name."""
    members.run(group_by_its_members, None, True)
    assert members.run(group_by_its_members, late, True, deadline=DEADLINE).values == (2.0, 2.0)
