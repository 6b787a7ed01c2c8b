"""The versions under which something was found."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import equivcheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions and machine; an empty version is a package that is not installed."""

    date: str
    """When, in UTC, as ``2026-01-31T12:00:00+00:00``."""
    equivcheck: str
    """Version of this package."""
    torch: str
    """Version of torch."""
    hypothesis: str
    """Version of Hypothesis."""
    numpy: str
    """Version of NumPy."""
    python: str
    """Version of Python."""
    platform: str
    """Operating system and processor, as `platform.platform` says."""


def environment() -> Environment:
    """What is installed here, now; reads package metadata only, so it imports no torch."""
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
