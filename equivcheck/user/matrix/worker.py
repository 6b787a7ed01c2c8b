"""Worker process that checks a recipe's layouts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from equivcheck.errors import UsageError
from equivcheck.system.printable import escape_unprintable
from equivcheck.user.matrix.matrix import Matrix
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.recipe import defined_in
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.workers.link import SupervisorLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """First message to a worker process: the recipe to check."""

    recipe: Path
    """The recipe's file."""
    world: str | None
    """World that replaces the one given by each layout; None replaces none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Message from a worker process after it has read the recipe, with a row for each layout."""

    rows: tuple[LayoutRow, ...]
    """A row for each layout, before it is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer from a worker process if the recipe cannot be read, or defines no matrix. The process ends after it."""

    why: str
    """Reason, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDone:
    """Answer from a worker process after it has checked a layout."""

    row: LayoutRow
    """The layout's row, with its verdict."""
    is_spent: bool
    """Whether this process must be replaced, because a rank's thread in it still runs and could not be stopped."""


def main(fd: int) -> None:
    """Run a worker process: check layouts for the supervisor at the other end of the socket `fd`, until the supervisor ends."""
    link = SupervisorLink(fd)
    order: Order = link.task
    sys.path.insert(0, str(order.recipe.resolve().parent))  # layouts may import the recipe's neighbours when they run
    try:
        found = defined_in(order.recipe, Matrix)
    except UsageError as error:
        link.send(Refused(why=escape_unprintable(str(error))))
        return
    link.send(Layouts(rows=found.unchecked))
    while True:
        row = found.row(link.next(), order.world)
        link.send(LayoutDone(row=row, is_spent=bool(abandoned_threads())))
