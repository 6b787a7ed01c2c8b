"""Whether an import is under way, which must not be interrupted: a module half imported breaks its process for good."""

from __future__ import annotations

from types import FrameType

_IMPORT_FILES = "<frozen importlib"
"""Where Python's import system runs: what it calls is inside an import."""


def is_inside_import(frame: FrameType | None) -> bool:
    """Whether a frame, or one that has called it, is of the import system."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_FILES):
            return True
        frame = frame.f_back
    return False
