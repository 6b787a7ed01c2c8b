"""The process that checks one layout of a recipe after the other."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from equivcheck.errors import UsageError
from equivcheck.system.printable import printable
from equivcheck.user.matrix.matrix import Matrix
from equivcheck.user.matrix.recipe import matrix_of
from equivcheck.user.matrix.row import Row
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.workers.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """To the process, first of all: whose layouts it is to check, and where."""

    recipe: Path
    """The file."""
    world: str | None
    """In place of what layouts ask for; None for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """From the process: the recipe has been read, and has these layouts."""

    rows: tuple[Row, ...]
    """Each as it is while nothing is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """From the process, which then ends: the recipe cannot be read, or defines no matrix."""

    why: str
    """In a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDone:
    """From the process: the answer to the name of a layout."""

    row: Row
    """What was found."""
    is_spent: bool
    """Whether a rank that could not be stopped still runs in the process, so that it is of no use any more."""


def main(fd: int) -> None:
    """Serve the supervisor at the other end of `fd` until it ends."""
    link = Link(fd)
    order: Order = link.task
    sys.path.insert(0, str(order.recipe.resolve().parent))  # for what layouts import once they run
    try:
        found = matrix_of(order.recipe)
    except UsageError as error:
        link.send(Refused(why=printable(str(error))))
        return
    link.send(Layouts(rows=found.unchecked))
    _serve(link, found, order)


def _serve(link: Link, found: Matrix, order: Order) -> None:
    while True:
        row = found.row(link.next(), order.world)
        link.send(LayoutDone(row=row, is_spent=bool(abandoned_threads())))
