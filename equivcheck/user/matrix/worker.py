"""Worker process for a recipe's layouts."""

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
    """First message to the worker process: the recipe, and a world if one was chosen."""

    recipe: Path
    """Path to the recipe's file."""
    world: str | None
    """World that overrides the layouts' worlds; None keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Reply after the recipe was read: its layouts."""

    rows: tuple[LayoutRow, ...]
    """All layouts' rows before any check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Reply if the recipe cannot be read or defines no matrix. The process ends after it."""

    why: str
    """Reason, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDone:
    """Reply after a layout was checked."""

    row: LayoutRow
    """Checked row."""
    is_spent: bool
    """Whether a rank's thread could not be stopped and still runs, so that the process must be replaced."""


def main(fd: int) -> None:
    """Check layouts for the supervisor, connected through the socket `fd`, until the supervisor ends."""
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
