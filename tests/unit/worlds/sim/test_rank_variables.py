"""Process-wide torch state changed by a rank is its own, and the process's again after the run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.sim.ranks import SimRanks
from equivcheck.worlds.state.rank_variables import VARIABLES, RankVariables

World = Callable[[int], SimRanks]


def owner_and_name(module: str, path: str) -> tuple[Any, str]:
    """Owner and name of a variable."""
    owner: Any = pytest.importorskip(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


@pytest.mark.parametrize(("module", "path"), [(module, path) for module, paths in VARIABLES.items() for path in paths])
def test_a_variable_is_the_ranks_own(world: World, module: str, path: str) -> None:
    """A changed variable, in place or not, stays for that rank until its end; other ranks and the process do not see it."""
    owner, name = owner_and_name(module, path)
    if not hasattr(owner, name):
        pytest.skip(f"this torch has no {path}")
    before = getattr(owner, name)
    content = before.copy() if isinstance(before, dict | set) else before
    marker = object()

    def change() -> None:
        value = getattr(owner, name)
        if isinstance(value, dict):
            value[marker] = None
        elif isinstance(value, set):
            value.add(marker)
        else:
            setattr(owner, name, marker)

    def changed() -> bool:
        value = getattr(owner, name)
        return marker in value if isinstance(value, dict | set) else value is marker

    def program() -> list[bool]:
        seen = [changed()]
        if dist.get_rank() == 1:
            change()
        for _ in range(2):
            dist.barrier()
            seen.append(changed())
        return seen

    assert world(3).run(program).values == ([False] * 3, [False, True, True], [False] * 3)
    assert getattr(owner, name) is before
    assert before == content


@contextlib.contextmanager
def global_hook() -> Iterator[None]:
    """A hook called by every module."""
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


CONTEXTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "loss_parallel": (loss_parallel, lambda: len(DTensor._op_dispatcher._custom_op_handlers)),
    "checkpoint early stop": (
        lambda: set_checkpoint_early_stop(False),
        lambda: torch.utils.checkpoint._enable_checkpoint_early_stop,
    ),
    "checkpoint debug": (lambda: set_checkpoint_debug_enabled(True), lambda: torch.utils.checkpoint._checkpoint_debug_enabled),
    "parametrizations cached": (parametrize.cached, lambda: parametrize._cache_enabled),
    "mutation of saved tensors": (
        torch.autograd.graph.allow_mutation_on_saved_tensors,
        lambda: torch.autograd.graph._allow_mutation_on_saved_tensors_enabled,
    ),
    "hook of all modules": (global_hook, lambda: len(nn.modules.module._global_forward_hooks)),
}
"""Context managers of torch that write to the process, and observations to show whether one is entered."""


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_a_rank_enters_others_do_not_notice(world: World, name: str) -> None:
    """Ranks enter a context one after the other and leave before the last has entered; each sees its own state."""
    enter, state = CONTEXTS[name]
    outside = state()

    def program() -> list[bool]:
        rank, inside = dist.get_rank(), []
        for _ in range(rank):
            dist.barrier()
            inside.append(state() != outside)
        with enter():
            dist.barrier()
            inside.append(state() != outside)
        for _ in range(2 - rank):
            dist.barrier()
            inside.append(state() != outside)
        return inside

    assert world(3).run(program).values == tuple([turn == rank for turn in range(3)] for rank in range(3))
    assert state() == outside


def test_a_rank_unwinds_in_its_own_state(world: World) -> None:
    """Ranks that wait inside a context when another one fails leave it normally, and the process is restored."""
    outside = len(DTensor._op_dispatcher._custom_op_handlers)
    seen: list[tuple[bool, bool]] = []

    def program() -> None:
        rank = dist.get_rank()
        if rank == 2:
            raise ValueError("meant")
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(loss_parallel())
            try:
                dist.barrier()
            finally:
                seen.append((rank == 0, len(DTensor._op_dispatcher._custom_op_handlers) != outside))

    with pytest.raises(RanksFailed, match="meant"):
        world(3).run(program)
    assert sorted(seen) == [(False, False), (True, True)]
    assert len(DTensor._op_dispatcher._custom_op_handlers) == outside


def test_an_exception_inside_a_context_ends_with_its_run(world: World) -> None:
    """`loss_parallel` removes its handlers only if it exits without an exception; the next run must not have them."""
    outside = len(DTensor._op_dispatcher._custom_op_handlers)

    def program() -> None:
        with loss_parallel():
            raise ValueError("meant")

    with pytest.raises(RanksFailed, match="meant"):
        world(2).run(program)
    assert world(2).run(lambda: len(DTensor._op_dispatcher._custom_op_handlers)).values == (outside,) * 2
    assert len(DTensor._op_dispatcher._custom_op_handlers) == outside


def test_what_the_process_has_ranks_have(world: World) -> None:
    """Ranks start from the values of the process, as forked processes would."""
    with global_hook():
        assert world(2).run(lambda: len(nn.modules.module._global_forward_hooks)).values == (1, 1)
    assert world(2).run(lambda: len(nn.modules.module._global_forward_hooks)).values == (0, 0)


def test_modules_that_come_later_are_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of a module imported between two switches of ranks is separate from then on."""
    variables = RankVariables()
    module = "torch.nn.utils.parametrize"
    monkeypatch.setattr(torch.nn.utils.parametrize, "_cache_enabled", 3)
    monkeypatch.delitem(importlib.import_module("sys").modules, module)
    with variables.kept():
        variables.save()
        monkeypatch.setitem(importlib.import_module("sys").modules, module, parametrize)
        first = variables.save()
        parametrize._cache_enabled = 7
        second = variables.save()
        variables.restore(first)
        assert parametrize._cache_enabled == 3
        variables.restore(second)
        assert parametrize._cache_enabled == 7
    assert parametrize._cache_enabled == 3
