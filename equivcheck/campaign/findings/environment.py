"""Records the package versions installed when a finding was made."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import equivcheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Installed versions and machine at the time of a finding. An empty version means that the package is not installed."""

    date: str
    """Time in UTC, such as ``2026-01-31T12:00:00+00:00``."""
    equivcheck: str
    """Version from `equivcheck.__version__`."""
    torch: str
    """Torch version."""
    hypothesis: str
    """Hypothesis version."""
    numpy: str
    """NumPy version."""
    python: str
    """Python version."""
    platform: str
    """Operating system and processor, from `platform.platform`."""


def environment() -> Environment:
    """Return the versions installed now. Reads only package metadata, so it does not import torch."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        equivcheck=equivcheck.__version__,
        torch=_installed("torch"),
        hypothesis=_installed("hypothesis"),
        numpy=_installed("numpy"),
        python=platform.python_version(),
        platform=platform.platform(),
    )


@cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
