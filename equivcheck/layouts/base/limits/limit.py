"""The limit types, and a lookup for the parallelism that a limit is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from equivcheck.scenario import Layout, Parallelism, Training

P = TypeVar("P", bound=Parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A kind of training that a layout cannot run, or whose results differ by definition and not by a mistake."""

    reason: str
    """Text as ``<API>: <situation> is not supported: <consequence>``, without a final dot."""
    applies: Callable[[Training, Layout], bool]
    """Returns whether the limit forbids a scenario."""
    repair: Callable[[Training, Layout], Training]
    """Returns the nearest training that the limit allows. It must not break another limit."""
    upstream: bool = False
    """Whether torch itself raises if a scenario breaks the limit. Such a run must be correct or fail on every rank, and
    `frontier` draws such scenarios. If a scenario breaks another limit, its results differ by definition.
    """
    torch: str = ""
    """Affected torch versions as a PEP 440 specifier. Empty for all versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimit(Limit):
    """A kind of training that a layout cannot run because torch itself raises."""

    upstream: bool = True
    """True, because torch raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimit:
    """A kind of layout that cannot run any training, because its parallelisms, options or mesh do not fit together."""

    reason: str
    """Text as ``<API>: <situation> is not supported: <consequence>``, without a final dot."""
    applies: Callable[[Layout], bool]
    """Returns whether the limit forbids a layout."""
    repair: Callable[[Layout], Layout]
    """Returns the nearest layout that the limit allows, on the same mesh if possible. It must not break another limit."""
    torch: str = ""
    """Affected torch versions as a PEP 440 specifier. Empty for all versions."""


def reason_with_versions(limit: Limit | LayoutLimit) -> str:
    """Return the reason, followed by the affected versions if the limit does not hold for all: ``... (torch <2.11)``."""
    return f"{limit.reason} (torch {limit.torch})" if limit.torch else limit.reason


def parallelism_of(layout: Layout, kind: type[P]) -> P:
    """Return the layout's parallelism of type `kind`. The layout must have one."""
    found = next(iter(layout.of(kind)), None)
    assert found is not None, "a parallelism's limits are only checked for layouts that have it"
    return found
