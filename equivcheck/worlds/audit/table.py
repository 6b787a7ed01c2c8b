"""Declares how sim treats torch's state."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from importlib.resources import files

from equivcheck.system.choice import PrintableEnum
from equivcheck.worlds.state.of_process import PYTHON
from equivcheck.worlds.state.rank_flags import SETTERS
from equivcheck.worlds.state.rank_variables import VARIABLES


class Treatment(PrintableEnum):
    """How the world ``sim`` treats a process-wide variable, flag or cache in torch."""

    PER_RANK = "per_rank"
    SHARED = "shared"
    RESTORED = "restored"
    REFUSED = "refused"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """One row in `states.toml`: names of torch's variables, flags and caches, how ``sim`` treats them, and why."""

    treatment: Treatment
    """How ``sim`` treats the variables, flags and caches in this row."""
    reason: str
    """Why this treatment is correct, or how it is done; for refused state, the error raised on a rank."""
    names: tuple[str, ...]
    """Full dotted names; ``*`` matches any text."""
    torch: str = ""
    """torch versions in which the row applies, as a PEP 440 specifier; empty for all versions."""

    def covers(self, name: str) -> bool:
        """Whether the row contains this name of a torch variable, flag or cache, or a pattern that matches the name."""
        return _pattern(self.names).match(name) is not None


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)) or "(?!)")


@functools.cache
def rows() -> tuple[StateRow, ...]:
    """Return all rows. Rows for variables and flags that each rank has separately come first, then the rows in `states.toml`."""
    text = files("equivcheck.worlds.audit").joinpath("states.toml").read_text("utf-8")
    return (*_switched(), *(row for kind, group in tomllib.loads(text).items() for row in _declared(kind, group)))


def _declared(kind: str, group: Iterable[dict[str, object]]) -> Iterator[StateRow]:
    for row in group:
        names = row["names"]
        assert isinstance(names, list)
        yield StateRow(treatment=Treatment(kind), reason=str(row["reason"]), names=tuple(names), torch=str(row.get("torch", "")))


def _switched() -> Iterator[StateRow]:
    """Yield rows from the tables in `worlds.state`; flags are named by their setters."""
    variables = tuple(f"{module}.{path}" for module, paths in VARIABLES.items() for path in paths)
    setters = tuple(f"torch._C.*{name}" for name in SETTERS)
    yield StateRow(treatment=Treatment.PER_RANK, reason="a variable, saved and restored when ranks take turns", names=variables)
    yield StateRow(treatment=Treatment.PER_RANK, reason="a flag, saved and restored when ranks take turns", names=setters)
    restored = tuple(entry.name for entry in PYTHON)
    yield StateRow(
        treatment=Treatment.RESTORED, reason="state of Python: ranks share it, and it is restored after a run", names=restored
    )


def is_outside(module: str) -> bool:
    """Whether the search for torch's state skips this module."""
    return any(row.covers(module) for row in rows() if row.treatment is Treatment.OUTSIDE)


def row_of(name: str) -> StateRow | None:
    """Return the first row that covers the torch variable, flag or cache `name`; None if no row does."""
    return next((row for row in rows() if row.treatment is not Treatment.OUTSIDE and row.covers(name)), None)


def unclassified_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return, in sorted order, the names that no row in `states.toml` covers."""
    return tuple(sorted(name for name in names if row_of(name) is None))
