"""Version of the installed torch, and whether a version range contains it.

Limits, options, expected calls and known issues declare the range in which they hold.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

OLDEST = Version("2.9")
"""Oldest supported torch; `pyproject.toml` requires it."""


def installed_torch() -> Version:
    """Return the version of the installed torch. A nightly build before a release counts as that release.

    The version is read from package metadata, because importing torch is slow.
    """
    return Version(_installed().base_version)


def is_torch_in(versions: str) -> bool:
    """Whether a version range contains the installed torch. The range is a PEP 440 specifier such as ``>=2.9,<2.14``.

    An empty range contains every version.
    """
    return not versions or _contains(versions, installed_torch())


@cache
def _installed() -> Version:
    return Version(version("torch"))


@cache
def _contains(versions: str, release: Version) -> bool:
    return SpecifierSet(versions).contains(release)
