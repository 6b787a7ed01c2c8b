"""Run a scenario on the ranks of a world, in one part or in two around a checkpoint."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from equivcheck.errors import UsageError
from equivcheck.layouts.base.execution.compile_time import compile_seconds
from equivcheck.layouts.composition.full_tensors import asks_full_tensors
from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.composition.registry import imports_of
from equivcheck.scenario import Layout, Scenario
from equivcheck.system.temporary_folder import require_space, temporary_folder
from equivcheck.training.setup import Setup
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import LOCAL_WORLDS, WORLDS_WITH_DATA, ranks
from equivcheck.worlds.ranks import Ranks, Run, rerun_if_died
from equivcheck.worlds.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksResult:
    """Traces from all ranks that ran a scenario, before and after a checkpoint if there is one."""

    run: Run
    """The run under the scenario's layout, with a trace from each rank."""
    before: tuple[Trace, ...] = ()
    """Traces from the layout before the checkpoint. Empty without a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs scenarios on a world's ranks."""

    world: str | Ranks
    """A world's name, or existing ranks for layouts with as many ranks."""
    deadline: float
    """Seconds in which the ranks must finish one part of the run: before or after a checkpoint."""
    alter: Callable[[Setup], None] | None = None
    """Function to plant a fault in each rank's setup. None for no fault."""

    def run(self, scenario: Scenario) -> RanksResult:
        """Run the scenario on the ranks. If it has a checkpoint, run the steps before it and the steps after it separately.

        Raises `RanksFailed` if a rank fails, and `NoSpace` if the disk is full. Raises `UsageError` if the world does not exist,
        or if its ranks cannot exchange data.
        """
        with warnings.catch_warnings():
            # Generated scenarios trigger many torch warnings, which must not become errors under -W error.
            warnings.simplefilter("ignore")
            try:
                if scenario.resume is not None:
                    return self._run_both(scenario, scenario.resume.layout)
                return RanksResult(run=self._part(scenario.layout, scenario, rank_program, scenario, self._change(scenario)))
            except RanksFailed:
                if scenario.resume is not None or is_compiled(scenario):
                    require_space()
                raise

    def _run_both(self, scenario: Scenario, first: Layout) -> RanksResult:
        from equivcheck.layouts.composition.resume import first_part, second_part

        members = self._members(first.mesh.num_ranks)
        with temporary_folder() as folder:
            require_shared(folder, members, self.deadline)
            try:
                before = self._part(first, scenario, first_part, scenario, folder, self._change(scenario)).values
            except RanksFailed as error:
                summary = f"before the checkpoint, under {first.name}: {error.failure.summary}"
                raise RanksFailed(replace(error.failure, summary=summary)) from None
            run = self._part(scenario.layout, scenario, second_part, scenario, folder, self._change(scenario))
            return RanksResult(run=run, before=before)

    def _change(self, scenario: Scenario) -> Callable[[Setup], None] | None:
        """Return the function that changes each rank's setup. If a fault is planted, nothing else is changed."""
        return read_full_tensors if self.alter is None and asks_full_tensors(scenario) else self.alter

    def _part(self, layout: Layout, scenario: Scenario, program: Callable[..., Trace], *arguments: Any) -> Run:
        members = self._members(layout.mesh.num_ranks)
        if not members.has_copies:
            for name in imports_of(layout):
                importlib.import_module(name)
        if layout.execution.is_compiled:
            members.prepare_to_compile()
        deadline = self.deadline + compile_seconds(scenario.training, layout)
        return rerun_if_died(
            lambda: members.run(
                program, *arguments, schedule_seed=scenario.schedule_seed, deadline=deadline, is_user_code=self.alter is not None
            )
        )

    def _members(self, size: int) -> Ranks:
        name = self.world if isinstance(self.world, str) else self.world.name
        members = self.world if isinstance(self.world, Ranks) and self.world.size == size else ranks(name, size)
        if not members.has_data:
            raise UsageError(
                f"world {name!r} is not valid: its collectives transfer no data to compare. "
                f"Expected one of {', '.join(WORLDS_WITH_DATA)}"
            )
        return members


def require_shared(folder: str, members: Ranks, deadline: float) -> None:
    """Raise `UsageError` if some hosts of the world cannot see the checkpoint folder."""
    if members.spans_hosts and not all(members.run(os.path.isdir, folder, deadline=deadline, is_user_code=False).values):
        raise UsageError(
            f"checkpoint folder {folder} is not valid: some hosts of world {members.name!r} do not see it. Expected a TMPDIR "
            "that all hosts share"
        )


def read_full_tensors(setup: Setup) -> None:
    """Let a rank also record the tensors that `full_tensor()` returns."""
    setup.reads_full_tensors = True


THREADS, PROCESSES = "sim", "gloo"
"""The world whose ranks share a process and cannot compile, and the world used instead."""


def world_for(scenario: Scenario, world: str | Ranks) -> str | Ranks:
    """Return the world on which to run the scenario: `world`, unless its ranks are threads and the scenario is compiled.

    Compiled scenarios get local processes instead, because threads share the compiler's state.
    """
    name = world if isinstance(world, str) else world.name
    return PROCESSES if name == THREADS and is_compiled(scenario) else world


def single_process_world(world: str) -> str:
    """Return `world` if one process can start its ranks, else the name of the world with local processes."""
    return world if world in LOCAL_WORLDS else PROCESSES


def is_compiled(scenario: Scenario) -> bool:
    """Whether a layout of the scenario uses torch's compiler."""
    return any(layout.execution.is_compiled for layout in scenario.layouts)
