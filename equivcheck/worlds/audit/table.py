"""What becomes in sim of each piece of torch's state, as declared."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from importlib.resources import files

from equivcheck.system.choice import Choice
from equivcheck.worlds.state.of_process import PYTHON
from equivcheck.worlds.state.rank_flags import SETTERS
from equivcheck.worlds.state.rank_variables import VARIABLES


class Treatment(Choice):
    """What becomes of it."""

    PER_RANK = "per_rank"
    SHARED = "shared"
    RESTORED = "restored"
    REFUSED = "refused"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """State that is treated alike for one reason."""

    treatment: Treatment
    """What becomes of it."""
    reason: str
    """By what, or why that is right; of what is refused, the error that a rank gets."""
    names: tuple[str, ...]
    """Full names; ``*`` stands for any text."""
    torch: str = ""
    """The versions that it is about, as a PEP 440 specifier; empty for all."""

    def covers(self, name: str) -> bool:
        """Whether one of the names is this one."""
        return _pattern(self.names).match(name) is not None


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)) or "(?!)")


@functools.cache
def rows() -> tuple[Row, ...]:
    """What `states.toml` declares, after the variables and flags that are switched with the ranks."""
    text = files("equivcheck.worlds.audit").joinpath("states.toml").read_text("utf-8")
    return (*_switched(), *(row for kind, group in tomllib.loads(text).items() for row in _declared(kind, group)))


def _declared(kind: str, group: Iterable[dict[str, object]]) -> Iterator[Row]:
    for row in group:
        names = row["names"]
        assert isinstance(names, list)
        yield Row(treatment=Treatment(kind), reason=str(row["reason"]), names=tuple(names), torch=str(row.get("torch", "")))


def _switched() -> Iterator[Row]:
    """The tables that stand elsewhere; flags have no name but those of the functions that set them."""
    variables = tuple(f"{module}.{path}" for module, paths in VARIABLES.items() for path in paths)
    setters = tuple(f"torch._C.*{name}" for name in SETTERS)
    yield Row(treatment=Treatment.PER_RANK, reason="saved and put back when ranks change: a variable", names=variables)
    yield Row(treatment=Treatment.PER_RANK, reason="saved and put back when ranks change: a flag", names=setters)
    restored = tuple(entry.name for entry in PYTHON)
    yield Row(treatment=Treatment.RESTORED, reason="of Python: ranks share it, and after a run it is as before", names=restored)


def is_outside(module: str) -> bool:
    """Whether a module is not looked through."""
    return any(row.covers(module) for row in rows() if row.treatment is Treatment.OUTSIDE)


def row_of(name: str) -> Row | None:
    """The first row that covers the name; None where nobody has said anything about it."""
    return next((row for row in rows() if row.treatment is not Treatment.OUTSIDE and row.covers(name)), None)


def unclassified(names: Iterable[str]) -> tuple[str, ...]:
    """Those that no row covers, sorted."""
    return tuple(sorted(name for name in names if row_of(name) is None))
