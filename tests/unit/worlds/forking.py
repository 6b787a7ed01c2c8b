"""Programs that fork their rank; other processes import them by name."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist


def _copied(folder: str) -> bool:
    """Fork rank 0 and record the copy's process id; True in the copy."""
    if dist.get_rank() or os.fork():
        return False
    Path(folder, str(os.getpid())).touch()
    return True


def comes_out(folder: str) -> float:
    """The copy returns too."""
    _copied(folder)
    return 1.0


def raises(folder: str) -> None:
    """The copy raises."""
    if _copied(folder):
        raise ValueError("from the copy")
    while not dist.get_rank() and not os.listdir(folder):
        time.sleep(0.01)


def communicates(folder: str) -> float:
    """The copy waits for ranks, which do not know it."""
    _copied(folder)
    total = torch.ones(1)
    dist.all_reduce(total)
    while not dist.get_rank() and not os.listdir(folder):
        time.sleep(0.01)
    return float(total)


def fails_beside(folder: str) -> None:
    """The rank raises while its copy stays."""
    if _copied(folder):
        time.sleep(1000)
    while not os.listdir(folder):
        time.sleep(0.01)
    raise ValueError("from the rank")


def ends_its_copies() -> tuple[int, int]:
    """Start a copy that ends by itself, a copy that execs another program, and processes of multiprocessing and subprocess."""
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    other = multiprocessing.get_context("fork").Process(target=int, daemon=True)
    other.start()
    other.join()
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "10")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), subprocess.call(["true"])


def computes() -> int:
    """Rank 0's copy computes for longer than an idle one may stay, and ends by itself."""
    if dist.get_rank() or os.fork():
        return 1
    while time.process_time() < 2.0:
        pass
    os._exit(0)
