"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write a file at once: a reader finds it as it was or as it is now, and so does whoever comes after a disk that is full."""
    written = file.with_name(f"{file.name}.part")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise
