"""Runs one training step on ranks, each with its own microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from equivcheck.user.batches import part_number
from equivcheck.user.running import members_of, run_training
from equivcheck.user.task import Task
from equivcheck.worlds.failure import Failure, RanksFailed
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRuns:
    """Runs the user's step on the ranks of a mesh."""

    task: Task
    """The training on ranks. Each run replaces its batch."""
    world: str | Ranks
    """World in which ranks run, or ranks that are already running."""
    schedule_seed: int
    """Seed for the order in which simulated ranks take turns."""
    deadline: float
    """Seconds after which ranks count as hung."""

    @property
    def world_name(self) -> str:
        """Name of the world."""
        return self.world if isinstance(self.world, str) else self.world.name

    def traces(self, batches: Sequence[Sequence[Any]]) -> tuple[Trace, ...]:
        """Train one step, and return each rank's trace.

        `batches` has a list of microbatches for each data rank. Raises `RanksFailed` if a rank fails.
        """
        task = replace(self.task, batches=(tuple(batches),), shard=partial(_own_microbatches, self.task))
        found = run_training(members_of(task, self.world), task, self.schedule_seed, self.deadline).left
        if isinstance(found, Failure):
            raise RanksFailed(found)
        return tuple(found.values)


def _own_microbatches(task: Task, batch: Sequence[Any], mesh: DeviceMesh) -> list[Any]:
    return list(batch[part_number(task, mesh)])
