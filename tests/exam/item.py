"""What an item of the exam is: a silent bug of public record, and how it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivcheck import Verdict, check, check_training
from equivcheck.mutants.registry import mutant
from equivcheck.system.choice import PrintableEnum
from equivcheck.user.verdict import UserVerdict
from mutants.minimums import MINIMUMS


class Found(PrintableEnum):
    """What finds a bug."""

    GENERATOR = "the generator"
    """It is a mutant, which the self-test plants in scenarios that it draws."""
    RECIPE = "a recipe"
    """It is a layout of a recipe in `examples/`."""
    CHECK_TRAINING = "check_training"
    """A training of a user, written for the exam."""
    NOT_TRIED = "not tried"
    """There is no program for it; the item says why."""


@dataclass(frozen=True, slots=True)
class Planted:
    """The smallest generated scenario that shows a mutant."""

    name: str
    """Of the mutant."""

    def wrong(self) -> Verdict:
        """With the bug."""
        return check(MINIMUMS[self.name], alter=mutant(self.name).plant)

    def right(self) -> Verdict:
        """Without it."""
        return check(MINIMUMS[self.name])


@dataclass(frozen=True, slots=True)
class Listed:
    """A layout of a recipe: the tests of recipes run it, and those beside it that are right."""

    recipe: str
    """The name of the file."""
    layout: str
    """That has the bug."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A training of a user."""

    brought: dict[str, Any]
    """Arguments of `check_training`, without the bug."""
    bug: dict[str, Any]
    """What it changes of them."""

    def wrong(self) -> UserVerdict:
        """With the bug."""
        return check_training(**(self.brought | self.bug), explain=False)

    def right(self) -> UserVerdict:
        """Without it."""
        return check_training(**self.brought, explain=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A bug of public record."""

    name: str
    """Project and number."""
    link: str
    """Where it is told."""
    about: str = ""
    """In one sentence; empty where nobody who wrote this has read it."""
    by: Planted | Listed | Callable[[], Trained] | None = None
    """What finds it."""
    first: str = ""
    """Where ranks must differ first: step, phase and tensor."""
    note: str = ""
    """What else readers have to know: how it was made to show, or why it was not tried."""
    torch: str = ">=2.9"
    """The versions of torch that can run it."""

    @property
    def found(self) -> Found:
        """What finds it, in short."""
        if self.by is None:
            return Found.NOT_TRIED
        kinds = {Planted: Found.GENERATOR, Listed: Found.RECIPE}
        return kinds.get(type(self.by), Found.CHECK_TRAINING)
