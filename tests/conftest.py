"""Profiles of this repository's own tests: ``ci``, ``dev`` and ``nightly``, by ``--hypothesis-profile``."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from packaging.version import Version

from equivcheck.system import torch_version
from equivcheck.system.collection import COLLECTION_THRESHOLDS
from equivcheck.system.printable import WIDTH
from equivcheck.system.profiles import register_profiles
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.workers import fork_server
from equivcheck.worlds.workers.fork_server import WorkerForkServer
from equivcheck.worlds.workers.process import worker_environment

register_profiles(prefix="")
settings.load_profile("dev")  # unless `--hypothesis-profile` names one: Hypothesis's own would limit the time of an example
# Hypothesis also draws constants found in local modules imported so far (6.131 and later). Without this line, examples would
# depend on which tests a worker ran before, even in the derandomized profile.
providers._get_local_constants = providers.Constants
gc.disable()  # until tests are collected: it would look through all imported modules again and again, a quarter of that time
os.environ["COLUMNS"] = str(WIDTH)  # verdicts are as wide as the terminal, and tests compare their lines

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Of a shell's background job interrupts are ignored, and then by every process that it starts: tests interrupt some.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def of_torch_213(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits, expected calls and issues are those of torch 2.13, whichever is installed."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version("2.13.0"))


@pytest.fixture(scope="session")
def worker_fork_servers() -> Iterator[list[WorkerForkServer]]:
    """One for all tests that use it, where workers can be forked: it imports, and checks each layout once."""
    if sys.platform != "linux":
        yield []
        return
    with contextlib.closing(WorkerForkServer("equivcheck.campaign.workers.warming", worker_environment())) as server:
        yield [server]


@pytest.fixture(scope="module")
def workers_are_forked(worker_fork_servers: list[WorkerForkServer]) -> Iterator[None]:
    """All workers of a module's tests are forked from one process, whatever they do: each saves seconds of imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_servers", worker_fork_servers)
        yield


@pytest.fixture
def workers_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module whose workers are forked, those of a test are new processes: it sets variables, or looks for processes."""
    monkeypatch.setattr(fork_server, "_servers", [])


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers that are understood here."""
    config.addinivalue_line("markers", "torch(versions, why): skipped on a torch that is not in the range of versions")
    config.addinivalue_line(
        "markers", "corpus: of known issues, what only another torch changes; torch environments run it, with `-m ''`"
    )
    config.addinivalue_line(
        "markers", "slow: takes seconds to show what a quicker test shows in part; torch environments run it as well"
    )


def pytest_collection_finish() -> None:
    """Collections of garbage need not look through what is imported, which stays, and are as rare as in a campaign's workers."""
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the installed torch does not have."""
    for marker in item.iter_markers("torch"):
        versions, why = marker.args
        if not is_torch_in(versions):
            pytest.skip(f"needs torch {versions}: {why}")
