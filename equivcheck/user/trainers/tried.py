"""Versions of frameworks with which adapters were tried."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Tried:
    """Oldest and newest version of a package with which an adapter was tried."""

    package: str
    """Name on the package index."""
    oldest: str
    """Oldest version. ``5.9`` includes 5.9.1."""
    newest: str
    """Newest version. ``5.24`` includes 5.24.1."""

    def note(self) -> str:
        """Return a note that the installed version was not tried.

        Empty if it was tried, or if the package has no installed version.
        """
        try:
            installed = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return ""
        if _is_at_most(self.oldest, installed) and _is_at_most(installed, self.newest):
            return ""
        tried = self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"untried version: {self.package} {installed}; if it fails, try {tried}"


def _is_at_most(version: str, limit: str) -> bool:
    """Compare as many numbers as the shorter version has."""
    numbers, limits = Version(version).release, Version(limit).release
    length = min(len(numbers), len(limits))
    return numbers[:length] <= limits[:length]


def untried_versions(trainer: object) -> tuple[str, ...]:
    """Return notes about packages whose installed version was not tried. The adapter's attribute `tried` lists tried versions."""
    tried: tuple[Tried, ...] = getattr(trainer, "tried", ())
    return tuple(filter(None, (each.note() for each in tried)))
