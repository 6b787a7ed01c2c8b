"""Runs a torchrun script in processes forked from one that has already imported torch.

This saves the seconds that each rank would need to import torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

SECONDS = 90.0
"""Default limit in seconds. A script takes less than 1 s, and 20 s more if a rank waits until the timeout."""
_PRELOADED = [
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.proxy_tensor",
]


def run_forked(script: Path, ranks: int, output: Path, seconds: float = SECONDS) -> tuple[int, str]:
    """Run a script on `ranks` processes. Returns an exit code and all ranks' output, sorted by rank.

    The exit code is 1 if any rank's exit code is not 0. While the script runs, rank `i` prints to the file `i` in the folder
    `output`. A rank that exceeds `seconds` is killed, and its output says so.
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
                printed.write(f"rank {rank} did not finish within {seconds:.0f} s\n")
        process.kill()
        process.join()
    code = int(any(process.exitcode != 0 for process in processes))
    files = [output / str(rank) for rank in range(ranks)]
    return code, "".join(file.read_text("utf-8") for file in files if file.exists())


@cache
def _forks() -> ForkServerContext:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(_PRELOADED)
    return forks


def _free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        port: int = unbound.getsockname()[1]
        return port


def _rank(script: str, rank: int, size: int, port: int, output: str) -> None:
    """Set the environment as torchrun does, then run the script as the main module."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"})
    sys.argv = [script]
    with (
        Path(output, str(rank)).open("w", encoding="utf-8", buffering=1) as printed,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        import torch

        torch.set_num_threads(1)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit:
            raise
        except BaseException:  # as the interpreter does; errors of torch.distributed.checkpoint are no subclass of Exception
            traceback.print_exc()
            sys.exit(1)
