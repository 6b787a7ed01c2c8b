"""Number of threads for torch's computations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside this context, torch computes with one thread in this process.

    Results are then bitwise reproducible, and tiny tensors do not wait for a thread pool.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
