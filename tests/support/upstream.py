"""What is wrong with torch shows with torch alone: folders with a script each, held against a table of versions."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives.worlds import run_in
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.failure import RanksFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A script, and where it shows something; measured on 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0."""

    name: str
    """Of the script."""
    ranks: int = 2
    """How many it takes."""
    torch: str = ""
    """The versions of torch that it shows it in; empty for all of them."""
    error: str = ""
    """Regular expression of what it raises instead in some versions; empty if it always prints a difference."""


def max_difference(module: str) -> float:
    """What a script finds on a rank."""
    found: float = importlib.import_module(module).max_difference()
    return found


def max_difference_or_error(module: str) -> float | str:
    """The same, or what it raises."""
    try:
        return max_difference(module)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def assert_listed(package: str, rows: Sequence[Upstream]) -> None:
    """Each script of a folder has a row, under its name, which is in its command as well."""
    folder = Path(__file__).parents[1] / package.replace(".", "/")
    assert sorted(path.stem for path in folder.glob("*.py")) == [row.name for row in rows]
    for row in rows:
        assert f"--nproc-per-node {row.ranks} {row.name}.py" in (folder / f"{row.name}.py").read_text("utf-8")


def assert_shows(package: str, row: Upstream) -> None:
    """Over gloo some rank has another number than it should, or an error; in versions without the problem none has."""
    by_rank = run_in("gloo", row.ranks, max_difference_or_error, f"{package}.{row.name}")
    if not is_torch_in(row.torch):
        assert not any(by_rank), by_rank
    else:
        assert any(shows(row, found) for found in by_rank), by_rank


def shows(row: Upstream, found: float | str) -> bool:
    """Whether what a script found on a rank is what its row tells of."""
    return found > 0 if isinstance(found, float) else bool(row.error and re.search(row.error, found))


def assert_sim_agrees(package: str, row: Upstream) -> None:
    """The simulation has what gloo has, or the right numbers, or refuses; never a wrong number that gloo does not have."""
    over_gloo = run_in("gloo", row.ranks, max_difference_or_error, f"{package}.{row.name}")
    try:
        simulated = run_in("sim", row.ranks, max_difference, f"{package}.{row.name}")
    except RanksFailed as failed:
        failure = str(failed)
    else:
        raised = any(isinstance(found, str) for found in over_gloo)
        assert raised or all(found in (0.0, wrong) for found, wrong in zip(simulated, over_gloo, strict=True))
        return
    assert re.search(row.error or "gloo (transfers wrong elements|computes wrong values)", failure), failure
