"""If one rank enters or leaves a context manager of torch, other ranks do not notice."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.sim.ranks import SimRanks
from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.state import rank_flags, rank_variables
from unit.worlds.sim.contexts import CONTEXTS, looked_at, seen_in_turn

Action = str | Literal[0, 1, 2]
"""Enter the named context, leave the innermost one (possibly by an exception), or do nothing."""
STAY, LEAVE, RAISE = 0, 1, 2
Seen = list[tuple[Any, ...]]
World = Callable[[int], SimRanks]


class Meant(Exception):
    """Exception by which a rank leaves a context."""


def acted(actions: tuple[Action, ...], names: tuple[str, ...]) -> Seen:
    """Observations of a rank after each of its actions, with actions of other ranks in between."""
    entered: list[AbstractContextManager[Any]] = []
    seen = [looked_at(names)]
    try:
        for action in (*actions, *[LEAVE] * len(actions)):
            act(action, entered)
            seen.append(looked_at(names))
            dist.barrier()
            seen.append(looked_at(names))
    finally:
        while entered:
            act(LEAVE, entered)
    return seen


def act(action: Action, entered: list[AbstractContextManager[Any]]) -> None:
    """Perform the action, and ignore torch's errors if a context cannot be entered or left here."""
    with not_more_than(CallRefused), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some things once for a process
        if isinstance(action, str):
            context = CONTEXTS[action][0]()
            context.__enter__()
            entered.append(context)
        elif action == LEAVE and entered:
            entered.pop().__exit__(None, None, None)
        elif action == RAISE and entered:
            try:
                raise Meant
            except Meant as error:
                entered.pop().__exit__(Meant, error, error.__traceback__)


@contextlib.contextmanager
def not_more_than(error: type[Exception]) -> Iterator[None]:
    """Suppress only this error."""
    try:
        yield
    except error:
        raise
    except Exception:
        return


def noticed(world: World, programs: tuple[tuple[Action, ...], ...]) -> list[int]:
    """Ranks with observations other than alone, unless one was refused."""
    names = tuple(sorted({action for action in itertools.chain(*programs) if isinstance(action, str)}))
    outside = looked_at(names)
    try:
        together = world(len(programs)).run(lambda: acted(programs[dist.get_rank()], names)).values
    except RanksFailed as failure:
        if "CallRefused" in str(failure):
            return []
        raise
    alone = [world(1).run(lambda actions=actions: acted(actions, names)).values[0] for actions in programs]
    assert looked_at(names) == outside
    return [rank for rank, (one, other) in enumerate(zip(together, alone, strict=True)) if one != other]


def programs(names: tuple[str, ...]) -> st.SearchStrategy[tuple[tuple[Action, ...], ...]]:
    """Equally many actions for two or three ranks."""
    action = st.one_of(st.sampled_from(names), st.sampled_from((LEAVE, RAISE, STAY)))
    return st.integers(2, 3).flatmap(
        lambda ranks: st.integers(1, 4).flatmap(lambda length: st.tuples(*[st.tuples(*[action] * length)] * ranks))
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=programs(tuple(CONTEXTS)))
def test_a_rank_does_not_notice_what_others_enter(world: World, drawn: tuple[tuple[Action, ...], ...]) -> None:
    """For any order and nesting, with or without exceptions, each rank sees the same as alone, and the process sees nothing."""
    assert noticed(world, drawn) == []


@pytest.mark.parametrize("name", CONTEXTS)
def test_each_context_is_the_ranks_own(world: World, name: str) -> None:
    """One rank enters and leaves a context while another is inside, also by an exception."""
    assert noticed(world, ((name, STAY, LEAVE, STAY), (STAY, name, RAISE, name), (STAY, STAY, STAY, STAY))) == []


@pytest.mark.parametrize("name", CONTEXTS)
def test_each_context_does_something(world: World, name: str) -> None:
    """An observation shows whether a context is entered; otherwise the properties above could not fail for it."""
    seen = world(1).run(lambda: acted((name,), (name,))).values[0]
    assert seen[0] != seen[1]


def test_sim_agrees_with_gloo(world: World) -> None:
    """If one of two ranks is inside a context, sim and processes agree; they do not communicate, because some contexts forbid it.

    One difference is allowed: autograd starts no threads for a simulated rank.
    """
    names = tuple(name for name in CONTEXTS if name != "multithreading")
    simulated = world(2).run(seen_in_turn, names, dist.barrier).values
    assert simulated == ranks("gloo", 2).run(seen_in_turn, names, dist.get_rank).values


def test_forward_mode_is_for_one_rank_at_a_time(world: World) -> None:
    """A second rank gets an error, because torch has one level of dual numbers per process."""
    with pytest.raises(RanksFailed, match="CallRefused: forward-mode differentiation: a second simulated rank is not supported"):
        world(2).run(lambda: acted(("dual_level", STAY), ()))


PLANTED: dict[str, tuple[str, str, str]] = {
    "enable_wrap": ("variables", "torch.distributed.fsdp.wrap", ""),
    "loss_parallel": ("variables", "torch.distributed.tensor", ""),
    "hook of all modules": ("variables", "torch.nn.modules.module", ""),
    "checkpoint early stop": ("variables", "torch.utils.checkpoint", ""),
    "parametrize.cached": ("variables", "torch.nn.utils.parametrize", ""),
    "allow_mutation_on_saved_tensors": ("variables", "torch.autograd.graph", ""),
    "default dtype": ("flags", "", "default element type"),
    "deterministic algorithms": ("flags", "", "deterministic algorithms"),
    "detect_anomaly": ("flags", "", "anomaly detection"),
    "float32 precision": ("flags", "", "precision of float32 matrix products"),
    "sdpa_kernel": ("flags", "", "choice of implementations (oneDNN, NNPACK, cuDNN, attention), checks and warnings"),
}
"""Table and row whose removal makes a context visible to other ranks."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_row_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The property fails if a row is removed from the tables."""
    table, module, entry = PLANTED[name]
    if table == "variables":
        rest = {other: paths for other, paths in rank_variables.VARIABLES.items() if other != module}
        monkeypatch.setattr(rank_variables, "VARIABLES", rest)
    else:
        monkeypatch.setattr(rank_flags, "TORCH", tuple(row for row in rank_flags.TORCH if row.name != entry))
    worlds = {size: SimRanks(size) for size in (1, 2)}
    try:
        assert noticed(worlds.__getitem__, ((name, STAY, STAY), (STAY, STAY, STAY))) != []
    finally:
        for world in worlds.values():
            world.close()
