"""Facts about the recorded process."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist

from equivcheck.recording.trace import OUTPUT_DTYPES, Header

_VARIABLES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "ATEN_CPU_CAPABILITY")
"""Environment variables that may change values."""


def make_header(dtypes: Iterable[torch.dtype], *, num_steps: int | None, moved: int, notes: tuple[str, ...]) -> Header:
    """Return the header for this process's trace file.

    `dtypes` are the model outputs' dtypes. The other arguments are fields in `Header`.
    """
    has_ranks = dist.is_available() and dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
    found = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    facts = {"torch": torch.__version__, "python": platform.python_version(), OUTPUT_DTYPES: " and ".join(found)}
    return Header(
        rank=rank,
        num_ranks=num_ranks,
        argv=tuple(sys.argv),
        environment=facts | {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        num_steps=num_steps,
        moved=moved,
        notes=notes,
    )
