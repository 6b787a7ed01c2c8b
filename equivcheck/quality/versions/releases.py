"""Torch releases, and texts that name them, such as ``2.9..2.15``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

from packaging.version import InvalidVersion, Version

from equivcheck.errors import UsageError
from equivcheck.system.torch_version import OLDEST

RELEASED = tuple(map(Version, ("2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")))
"""Releases known to this version of equivcheck. An index is asked for newer releases."""
_INDEX_SECONDS = 30.0
"""Seconds for an index to list its versions."""


def chosen_releases(text: str, released: Iterable[Version], at_hand: Iterable[Version] = ()) -> tuple[Version, ...]:
    """Return the versions named by a text, oldest first: a list (``2.9.1,2.13``) with ranges (``2.9..2.15``, ``2.9..``).

    `at_hand` contains installed versions, and `released` the versions that can be installed. For a version without patch number,
    the latest installed patch version is chosen. If none is installed, it is the latest release. A range contains one version per
    minor version. A range from one nightly build to another contains all nightly builds between them. Raises `UsageError` for an
    invalid or missing version.
    """
    here = frozenset(at_hand)
    there = sorted(version for version in here.union(released) if not version.base_version.startswith("0") and version >= OLDEST)
    return tuple(sorted({version for part in text.split(",") for version in _named(part.strip(), there, here)}))


def needs_index(text: str) -> bool:
    """Whether the versions named by a text depend on the latest releases."""
    return any(".." in part or part.count(".") != 2 for part in text.split(","))


def names_nightlies(text: str) -> bool:
    """Whether a text such as ``2.16.0.dev20261120`` names nightly builds."""
    return "dev" in text


def list_releases(pip_arguments: Iterable[str]) -> tuple[Version, ...]:
    """Ask pip which torch versions an index has; empty if that fails."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check", *pip_arguments]
    try:
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INDEX_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    line = re.search(r"^Available versions: (.+)$", ran.stdout, re.MULTILINE)
    return tuple(Version(Version(text).public) for text in line[1].split(", ")) if line else ()


def _named(part: str, there: list[Version], at_hand: frozenset[Version]) -> Iterator[Version]:
    first, is_range, last = part.partition("..")
    if not is_range:
        yield _one(part, there, at_hand)
        return
    start, end = (
        _one(text, there, at_hand) if text else _of_minor(version.release[:2], there, at_hand)
        for text, version in ((first, there[0]), (last, there[-1]))
    )
    if end < start:
        raise UsageError(
            f"torch versions {part!r} is not valid: the last is older than the first. Expected a range such as 2.9..2.15"
        )
    if start.is_prerelease and end.is_prerelease:
        yield from (version for version in there if start <= version <= end and version.is_prerelease)
        return
    minors = {version.release[:2] for version in there if start <= version <= end}
    ends = {version.release[:2]: version for version in (start, end)}
    yield from (ends[minor] if minor in ends else _of_minor(minor, there, at_hand) for minor in minors)


def _one(text: str, there: list[Version], at_hand: frozenset[Version]) -> Version:
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(
            f"torch version {text!r} is not valid: not a version number. Expected 2.13, 2.13.0, 2.9..2.15, or a list of these"
        ) from None
    minor = version.release[:2]
    if text.count(".") == 1 and minor in {other.release[:2] for other in there}:
        return _of_minor(minor, there, at_hand)
    if version not in there:
        raise UsageError(f"torch version {text} is not valid: no such release. Expected one of {', '.join(map(str, there))}")
    return version


def _of_minor(minor: tuple[int, ...], there: list[Version], at_hand: frozenset[Version]) -> Version:
    versions = [version for version in there if version.release[:2] == minor]
    here = [version for version in versions if version in at_hand]
    stable = [version for version in versions if not version.is_prerelease]
    return (here or stable or versions)[-1]
