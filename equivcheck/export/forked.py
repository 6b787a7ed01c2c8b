"""Run a script that torchrun would run, in processes that are forked from one that has imported torch: seconds less for each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

SECONDS = 90.0
"""Until a script is given up; it takes less than one, and 20 more if a rank waits in vain."""
_PRELOADED = [
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.proxy_tensor",
]


def launched(script: Path, ranks: int, output: Path, seconds: float = SECONDS) -> tuple[int, str]:
    """Exit code (1 if any rank's is not 0) and what the ranks printed, one after the other, of a script on `ranks` processes.

    What rank `i` prints goes to the file `i` in the folder `output` meanwhile. One that is not done in time is ended, and said.
    """
    port, start = _free_port(), _forks().Process
    processes = [start(target=_rank, args=(str(script), rank, ranks, port, str(output))) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            with Path(output, str(rank)).open("a", encoding="utf-8") as printed:
                printed.write(f"rank {rank} was not done after {seconds:.0f} s\n")
        process.kill()
        process.join()
    code = int(any(process.exitcode != 0 for process in processes))
    return code, "".join(_printed(output / str(rank)) for rank in range(ranks))


@cache
def _forks() -> ForkServerContext:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(_PRELOADED)
    return forks


def _printed(file: Path) -> str:
    return file.read_text("utf-8") if file.exists() else ""


def _free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        port: int = unbound.getsockname()[1]
        return port


def _rank(script: str, rank: int, size: int, port: int, output: str) -> None:
    """What torchrun does for one process: the environment, then the script as the main module."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"})
    sys.argv = [script]
    with (
        Path(output, str(rank)).open("w", encoding="utf-8", buffering=1) as printed,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        _run(script)


def _run(script: str) -> None:
    """As the interpreter does: a traceback is printed for what is raised, and the exit code is what the script says."""
    import traceback

    import torch

    torch.set_num_threads(1)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # as at the top of an interpreter; what torch.distributed.checkpoint raises is no Exception
        traceback.print_exc()
        sys.exit(1)
