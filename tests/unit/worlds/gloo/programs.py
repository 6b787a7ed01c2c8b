"""Programs for ranks; other processes import them by name."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from equivcheck.training.setup import Setup
from equivcheck.worlds.meshes import device_mesh


def place() -> tuple[int, int]:
    """Global rank and world size."""
    return dist.get_rank(), dist.get_world_size()


def process() -> int:
    """Process id."""
    return os.getpid()


def first_compilation() -> bool:
    """Whether torch wraps methods of optimizers, as it does once in a process when it first compiles something."""
    from torch._dynamo.eval_frame import TorchPatcher

    before = torch.optim.Adam._init_group  # type: ignore[attr-defined]
    TorchPatcher.patch()
    return torch.optim.Adam._init_group is not before  # type: ignore[attr-defined]


def ranks_sum(weights: np.ndarray) -> np.ndarray:
    """Sum over ranks for (rank + 1) times `weights`."""
    term = torch.from_numpy(weights) * (dist.get_rank() + 1)
    dist.all_reduce(term)
    return term.numpy()


def random_number() -> float:
    """Number from torch's default generator."""
    return float(torch.rand(()))


def raise_on(ranks: tuple[int, ...]) -> None:
    """Raise on some ranks, for which the others wait."""
    if dist.get_rank() in ranks:
        raise ValueError(f"boom on {len(ranks)}")
    dist.barrier()


def leave_on(rank: int, code: int) -> None:
    """This rank ends its process, and the others wait for it."""
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def sys_exit() -> None:
    """Exit like a script."""
    sys.exit(3)


def segfault_on(rank: int) -> None:
    """This rank has a fatal error in native code."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def hang_on(rank: int) -> None:
    """This rank never comes, and the others wait for it."""
    if dist.get_rank() == rank:
        sleep_forever()
    dist.all_reduce(torch.ones(1))


def sleep_forever() -> None:
    """Sleep for a long time."""
    time.sleep(1000)


def spin() -> None:
    """Compute for a long time."""
    while True:
        pass


def make_lock() -> Any:
    """A value whose pickling fails."""
    return threading.Lock()


class Unreadable:
    """Value that can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def make_unreadable() -> Unreadable:
    """A value whose unpickling fails in the owner."""
    return Unreadable()


def start_sleeper() -> int:
    """Start a process, leave it running, and return its id."""
    return subprocess.Popen(["sleep", "1000"]).pid


def environment() -> tuple[int, str]:
    """Number of threads, and gloo's network interface."""
    return torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]


def is_imported(module: str) -> bool:
    """Whether this rank has imported a module."""
    return module in sys.modules


def imported_by_compiling() -> int:
    """Number of modules imported by a rank's compilation."""
    before = len(sys.modules)
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")
    compiled(torch.ones(2, 2)).sum().backward()
    return len(sys.modules) - before


def train_fully_sharded() -> float:
    """Last loss in a small FSDP2 training."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(4, 4, dtype=torch.float64), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, dtype=torch.float64)).square().sum()
        loss.backward()
        optimizer.step()
    return float(loss)


def drawn() -> tuple[float, float]:
    """Numbers from the generators of Python and NumPy."""
    return random.random(), float(np.random.rand())


def kill_rank(setup: Setup, first_only: Path | None) -> None:
    """Kill the process of rank 1, as from outside."""
    if dist.get_rank() == 1 and (first_only is None or not first_only.exists()):
        if first_only is not None:
            first_only.touch()
        os.kill(os.getpid(), signal.SIGKILL)
