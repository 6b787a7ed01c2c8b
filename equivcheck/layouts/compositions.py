"""Layouts of several parallelisms on one mesh."""

from __future__ import annotations

COMPOSITIONS: tuple[str, ...] = (
    "ddp x tensor_parallel",
    "replicate x tensor_parallel",
    "fsdp1 x tensor_parallel",
    "fsdp2 x tensor_parallel",
)
"""Their names, as `Layout.name` writes them: tags of the parallelisms, outermost first. Add a line to have one generated."""

TIMES = " x "
"""What stands between two tags."""
