"""What a limit is, and how it finds the parallelism that it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from equivcheck.scenario import (
    Layout,
    Parallelism,
    Training,
)

P = TypeVar("P", bound=Parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that a layout cannot run, or for which it is not equivalent by definition."""

    reason: str
    """One sentence for people: what, and why."""
    applies: Callable[[Training, Layout], bool]
    """Whether a scenario is beyond the limit."""
    repair: Callable[[Training, Layout], Training]
    """The nearest training within the limit, used instead of rejecting; it never adds what another limit forbids."""
    upstream: bool = False
    """Whether torch alone draws the line. Beyond it a run must be right or raise on every rank, and `frontier` goes there; beyond
    any other limit results differ by definition."""
    torch: str = ""
    """Versions of torch that have the limit, as a PEP 440 specifier; empty for every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimit:
    """A combination of parallelisms, options and mesh that cannot run whatever is trained."""

    reason: str
    """One sentence for people: what, and why."""
    applies: Callable[[Layout], bool]
    """Whether a layout is beyond the limit."""
    repair: Callable[[Layout], Layout]
    """The nearest layout within the limit, on the same mesh if any on that can run; it never adds what another limit forbids."""
    torch: str = ""
    """Versions of torch that have the limit, as a PEP 440 specifier; empty for every one."""


def in_words(limit: Limit | LayoutLimit) -> str:
    """The reason, and the versions of torch that it holds for where it does not hold for all: ``... (torch <2.11)``."""
    return f"{limit.reason} (torch {limit.torch})" if limit.torch else limit.reason


def parallelism_of(layout: Layout, kind: type[P]) -> P:
    """The parallelism of one kind in a layout that has it."""
    found = next(iter(layout.of(kind)), None)
    assert found is not None, "limits are asked only about layouts that have the parallelism"
    return found
