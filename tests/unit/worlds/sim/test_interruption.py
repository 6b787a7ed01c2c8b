"""Stopping a computing rank, but never inside an import."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos

from equivcheck.worlds.sim import interruption
from equivcheck.worlds.sim.interruption import interrupt, is_importing
from equivcheck.worlds.sim.ranks import SimRanks
from equivcheck.worlds.sim.scheduler import RankAborted

World = Callable[[int], SimRanks]

SLOW = """
import builtins
builtins.import_began.set()
builtins.import_may_end.wait()
whole = True
"""
"""A module with an import that lasts as long as a test wants."""

COMPUTING = """
import time
start = time.process_time()
while time.process_time() - start < 0.5:
    pass
whole = True
"""
"""A module with an import that computes for longer than a rank may without a call."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Create a module that can be imported under a name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, text: str) -> str:
        tmp_path.joinpath(f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    return make


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the slow module's import has begun."""
    event = threading.Event()
    monkeypatch.setattr("builtins.import_began", event, raising=False)
    return event


@pytest.fixture
def may_end(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set to let its import end."""
    event = threading.Event()
    monkeypatch.setattr("builtins.import_may_end", event, raising=False)
    return event


class Importing(threading.Thread):
    """Imports a module, and then computes until it is stopped."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self.module, self.aborted, self.enough = name, threading.Event(), threading.Event()

    def run(self) -> None:
        """Set `aborted` if the thread is interrupted."""
        try:
            importlib.import_module(self.module)
            while not self.enough.is_set():
                pass
        except RankAborted:
            self.aborted.set()


def test_an_import_is_waited_for(
    module: Callable[[str, str], str], began: threading.Event, may_end: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread inside an import is stopped afterwards; the module is complete."""
    thread, looks = Importing(module("imported_slowly", SLOW)), []
    thread.start()
    began.wait()

    def look(looked_at: threading.Thread) -> bool:
        looks.append(is_importing(looked_at))
        if len(looks) == 3:
            may_end.set()
        return looks[-1]

    monkeypatch.setattr(interruption, "is_importing", look)
    interrupt(thread, RankAborted, import_seconds=600.0)
    thread.join()
    assert looks[:3] == [True] * 3
    assert thread.aborted.is_set()
    assert sys.modules["imported_slowly"].whole


def test_an_import_that_takes_too_long_is_left_alone(
    module: Callable[[str, str], str], began: threading.Event, may_end: threading.Event
) -> None:
    """Nothing is raised in a thread with an endless import, then or later."""
    thread = Importing(module("imported_too_slowly", SLOW))
    thread.start()
    began.wait()
    interrupt(thread, RankAborted, import_seconds=0.0)
    may_end.set()
    thread.enough.set()
    thread.join()
    assert not thread.aborted.is_set()
    assert sys.modules["imported_too_slowly"].whole


def plan_redistributions(seconds: float) -> bool:
    """Plan new redistributions, without a call, for some seconds of CPU time."""
    mesh, end, rows = init_device_mesh("cpu", (1,)), time.process_time() + seconds, 0
    while time.process_time() < end:
        rows += 1
        meta = TensorMeta(torch.Size([rows]), (1,), torch.float32)
        source, target = (DTensorSpec(mesh, (placement,), tensor_meta=meta) for placement in (Shard(0), Replicate()))
        _gen_transform_infos(source, target)
    return True


def test_planning_redistributions_is_no_hang(world: World) -> None:
    """DTensor may plan for minutes before a call on a mesh with several dims."""
    assert world(1).run(plan_redistributions, 1.0, deadline=0.2).values == (True,)


def test_tracing_decompositions_is_no_hang(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor traces an operation without a strategy once for each combination of placements, which can take half a minute."""
    decompositions = pytest.importorskip("torch.distributed.tensor._decompositions", reason="torch before 2.11 has none")
    strategy = decompositions.DecompShardingStrategy
    monkeypatch.setattr(strategy, "_propagate_through_decomp", lambda *_: None)

    def trace(seconds: float) -> bool:
        end = time.process_time() + seconds
        while time.process_time() < end:
            strategy._propagate_through_decomp(strategy)
        return True

    assert world(1).run(trace, 1.0, deadline=0.2).values == (True,)


def test_an_import_that_computes_is_no_hang(world: World, module: Callable[[str, str], str]) -> None:
    """Time in an import does not count as a rank's computing."""
    name = module("imported_by_computing", COMPUTING)
    assert world(1).run(lambda: importlib.import_module(name).whole, deadline=0.2).values == (True,)
