"""Which torch is installed, and whether a range of versions has it.

What differs between versions is declared with the range that it holds in: limits, options, expected calls and known issues.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

OLDEST = Version("2.9")
"""The oldest torch that is supported; `pyproject.toml` asks for it."""


def installed_torch() -> Version:
    """The release that trainings run on, a nightly build as the one it leads to; read from metadata, as importing is slow."""
    return Version(_installed().base_version)


def torch_in(versions: str) -> bool:
    """Whether the installed torch is in a range, a PEP 440 specifier such as ``>=2.9,<2.14``; an empty one has every version."""
    return not versions or _contains(versions, installed_torch())


@cache
def _installed() -> Version:
    return Version(version("torch"))


@cache
def _contains(versions: str, release: Version) -> bool:
    return SpecifierSet(versions).contains(release)
