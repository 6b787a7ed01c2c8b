"""What scripts have word for word as ranks have it here."""

from __future__ import annotations

import inspect


def source_of(found: object) -> list[str]:
    """Lines of a class or function, as it is written here, but called by position."""
    return inspect.getsource(found).rstrip().replace(", kw_only=True", "").splitlines()  # type: ignore[arg-type]
