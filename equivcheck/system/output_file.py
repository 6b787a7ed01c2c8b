"""Atomic file writes."""

from __future__ import annotations

import contextlib
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write a file atomically: readers get the old or the new content, even if the disk is full."""
    written = file.with_name(f"{file.name}.part")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise
