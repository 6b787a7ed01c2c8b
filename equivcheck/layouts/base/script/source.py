"""Source code copied from equivcheck into scripts."""

from __future__ import annotations

import inspect


def source_of(found: object) -> list[str]:
    """Lines of a class or function. Dataclasses lose ``kw_only``, because scripts pass arguments by position."""
    return inspect.getsource(found).rstrip().replace(", kw_only=True", "").splitlines()  # type: ignore[arg-type]
