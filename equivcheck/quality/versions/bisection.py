"""Bisection: find the versions in which a fault begins and ends with few measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from packaging.version import Version

from equivcheck.campaign.findings.versions import Measured
from equivcheck.oracle.known_issues.showing import Showing, Shows

Measure = Callable[[Version], Showing]
"""Returns whether something shows on a version."""


def bisected(versions: Sequence[Version], measure: Measure, first: Iterable[Version] = ()) -> tuple[Measured, ...]:
    """Measure both ends and the versions in `first`, then bisect between versions with different answers.

    If it shows in no measured version, all versions are measured. A fault that appears and disappears between two versions with
    the same answer is missed.
    """
    found = {version: measure(version) for version in dict.fromkeys([versions[0], versions[-1], *first])}
    while (following := _next(versions, found)) is not None:
        found[following] = measure(following)
    return tuple(Measured(torch=str(version), showing=found[version]) for version in sorted(found))


def _next(versions: Sequence[Version], found: dict[Version, Showing]) -> Version | None:
    """Middle of the widest gap that may contain a change; None if there is no such gap."""
    shows_somewhere = any(showing.shows is Shows.SHOWS for showing in found.values())
    measured = [place for place, version in enumerate(versions) if version in found]
    gaps = [
        (before, after)
        for before, after in pairwise(measured)
        if after - before > 1 and not (shows_somewhere and found[versions[before]].shows is found[versions[after]].shows)
    ]
    if not gaps:
        return None
    before, after = max(gaps, key=lambda gap: gap[1] - gap[0])
    return versions[(before + after) // 2]
