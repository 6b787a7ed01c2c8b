"""Runs torch's own `distributed_test.py`, of the wheel that is installed, on simulated ranks: a line of JSON for each test.

usage: program.py FOLDER [NAME ...]     (FOLDER is for the tests' files; -NAME leaves a test out, and the others are run)

A process of its own, since torch's file reads the environment when it is imported, and changes settings of torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import unittest
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

SIZE = 8
"""The fewest ranks at which no test is left out for want of ranks."""
SEED = 67280421310721
"""Of each rank before each test, as torch's own processes have it."""
DEADLINE = 60.0


def environment(folder: Path) -> dict[str, str]:
    """What torch's file reads when it is imported."""
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "INIT_METHOD": "file://unused",
        "TEMP_DIR": str(folder),
    }


class NoProfile:
    """A profiler that records nothing, since ranks may not profile all at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.function_events: list[Any] = []

    def __enter__(self) -> NoProfile:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def tests_of(rank: int) -> type[unittest.TestCase]:
    """The tests for one rank, from a copy of the module: ranks share the process, and torch's file keeps state in its globals."""
    import torch.distributed as dist

    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    copied = importlib.util.spec_from_file_location(f"distributed_test_of_rank_{rank}", spec.origin)
    assert copied is not None
    assert copied.loader is not None
    module: Any = importlib.util.module_from_spec(copied)
    sys.modules[copied.name] = module
    copied.loader.exec_module(module)
    adapt(module, dist)
    found: type[unittest.TestCase] = type("Tests", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    return found


def adapt(module: Any, dist: ModuleType) -> None:
    """Ranks meet at a barrier, not in a folder by the numbers of their processes, and expect no events of a profiler."""
    module.Barrier.init = classmethod(lambda _: None)
    module.Barrier.sync = classmethod(lambda *_, **__: dist.barrier())
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS", "CUDA_PROFILING_SUPPORTED_BACKENDS"):
        setattr(module, name, [])


def outcome(tests: list[type[unittest.TestCase]], name: str, file: str) -> str:
    """``passed``, ``skipped: why``, or the traceback, of one test on the calling rank."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(SEED)
    case: Any = tests[dist.get_rank()](name)
    case.rank, case.file_name = dist.get_rank(), file
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as skip:
        return f"skipped: exit code {skip.code}"
    return "passed"


def main(folder: Path, names: list[str]) -> None:
    """Run them one after the other in one world."""
    os.environ |= environment(folder)
    warnings.simplefilter("ignore")
    import torch

    from equivcheck.worlds.failure import RanksFailed
    from equivcheck.worlds.world import World

    torch.autograd.profiler.profile = torch.profiler.profile = NoProfile  # type: ignore[assignment,misc]
    tests = [tests_of(rank) for rank in range(SIZE)]
    world = World("sim", size=SIZE)
    for name in chosen(dir(tests[0]), names):
        say({"name": name})
        program = partial(outcome, tests, name, str(folder / name))
        try:
            say({"name": name, "ranks": world.run(program, deadline=DEADLINE).values})
        except RanksFailed as error:
            stacks = [report.stack for report in error.failure.reports if report.error]
            say({"name": name, "failed": str(error), "stack": stacks[0] if stacks else ""})
            world.close()  # a test that ends early may have left its group destroyed
    world.close()


def chosen(found: list[str], names: list[str]) -> list[str]:
    """The names given, or all tests but those that are given with a minus."""
    left_out = [name.removeprefix("-") for name in names if name.startswith("-")]
    return [name for name in found if name.startswith("test") and (name not in left_out if left_out else name in names)]


def say(record: dict[str, Any]) -> None:
    """One line, of a test that begins (a name alone) or has ended."""
    REPORT.write(json.dumps(record) + "\n")
    REPORT.flush()


if __name__ == "__main__":
    REPORT = os.fdopen(os.dup(1), "w")
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # tests print
    main(Path(sys.argv[1]), sys.argv[2:])
