"""In which of a row of versions something begins and ends to show, by measuring few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from packaging.version import Version

from equivcheck.campaign.findings.versions import Measured
from equivcheck.oracle.known_issues.showing import Showing, Shows

Measure = Callable[[Version], Showing]
"""Tells whether something shows on a version."""


def bisected(versions: Sequence[Version], measure: Measure, first: Iterable[Version] = ()) -> tuple[Measured, ...]:
    """Measure both ends and some `first`, then between versions whose answers differ, until every change is between neighbours.

    While it shows nowhere, any version that is left may be the one that it shows in. A change and its undoing between two
    versions that agree are not seen.
    """
    found = {version: measure(version) for version in dict.fromkeys([versions[0], versions[-1], *first])}
    while (following := _next(versions, found)) is not None:
        found[following] = measure(following)
    return tuple(Measured(torch=str(version), showing=found[version]) for version in sorted(found))


def _next(versions: Sequence[Version], found: dict[Version, Showing]) -> Version | None:
    """The middle of the widest gap that a change may be in."""
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
