"""Tests for worlds by name and the public world."""

import threading

import pytest
import torch.distributed as dist

from equivcheck import UsageError, World
from equivcheck.worlds.pool import LOCAL_WORLDS, close_worlds, ranks
from unit.worlds.programs import added_on_even_ranks, lies_on_its_mesh, rank_and_sum


@pytest.mark.parametrize("name", LOCAL_WORLDS)
def test_a_world_runs_a_function_on_every_rank(name: str) -> None:
    """Values come in rank order, from ranks that can communicate."""
    with World(name, size=3) as world:
        assert world.run(rank_and_sum).values == ((0, 3), (1, 3), (2, 3))


@pytest.mark.parametrize("name", LOCAL_WORLDS)
def test_what_a_program_finds_out_on_its_own_mesh_ends_with_it(name: str) -> None:
    """Meshes of two programs are equal but have their own groups: ranks with a cached operation meet ranks without it."""
    with World(name, size=4) as world:
        world.run(added_on_even_ranks, 31)
        for _ in range(2):
            assert world.run(lies_on_its_mesh, 31, deadline=20.0).values == (True,) * 4


def test_a_simulated_world_runs_closures() -> None:
    """In sim any callable works, because ranks share the process."""
    offset = 10

    with World("sim", size=2) as world:
        assert world.run(lambda: offset + dist.get_rank()).values == (10, 11)


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("moon", 2, "'moon' is not valid: it does not exist. Expected one of sim, gloo, fake, torchrun"),
        ("sim", 0, "size 0 is not valid"),
        ("sim", None, "size None is not valid for sim"),
    ],
)
def test_a_world_that_cannot_be_is_refused(name: str, size: int | None, text: str) -> None:
    """The error names the allowed values."""
    with pytest.raises(UsageError, match=text):
        World(name, size=size)


def test_ranks_are_kept_until_worlds_are_closed() -> None:
    """A second request returns the same ranks; after `close_worlds` no rank thread is left, and new ranks can be opened."""
    first = ranks("sim", 2)
    assert ranks("sim", 2) is first
    first.run(rank_and_sum)

    close_worlds()

    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sim-rank")]
    assert ranks("sim", 2).run(rank_and_sum).values == ((0, 1), (1, 1))
