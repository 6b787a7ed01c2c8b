"""What is wrong with differentiable collectives shows with torch alone: a script each in the folder `upstream`."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from collectives.worlds import run_in
from equivcheck.torch_version import torch_in
from equivcheck.worlds.failure import RanksFailed

FOLDER = Path(__file__).parent / "upstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A script, and where it shows something; measured on 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0."""

    name: str
    """Of the script."""
    torch: str = ""
    """The versions of torch that it shows it in; empty for all of them."""
    error: str = ""
    """Regular expression of what it raises; empty if it prints a difference."""


UPSTREAM = (
    Upstream(name="all_gather_transposed"),
    Upstream(name="all_reduce_of_maximum"),
    Upstream(name="broadcast_gradient_of_mixed_orders"),
    Upstream(name="broadcast_in_a_later_group", torch="<2.14"),
    Upstream(name="broadcast_of_mixed_orders"),
    Upstream(name="functional_broadcast"),
    Upstream(name="gather_in_a_later_group", error="gather_list"),
    Upstream(name="gather_of_sum"),
    Upstream(name="permute_of_rows", error="[Ss]plit.sizes"),
    Upstream(name="reduce_of_mean"),
    Upstream(name="scatter_of_columns"),
    Upstream(name="waited_coalesced_reduce_scatter", torch=">=2.11", error="modified inplace"),
    Upstream(name="waited_view_of_a_gather", torch=">=2.12"),
)


def max_difference(name: str) -> float:
    """What a script finds on a rank."""
    found: float = importlib.import_module(f"collectives.upstream.{name}").max_difference()
    return found


def max_difference_or_error(name: str) -> float | str:
    """The same, or what it raises."""
    try:
        return max_difference(name)
    except (RuntimeError, ValueError) as error:
        return str(error)


def test_each_script_is_in_the_table() -> None:
    """Under its name, which is in its command as well."""
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == [row.name for row in UPSTREAM]
    assert all(f"--nproc-per-node 2 {path.name}" in path.read_text("utf-8") for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row.name)
def test_it_shows_where_the_table_says(row: Upstream) -> None:
    """Over gloo some rank has another number than it should, or an error; in versions without the problem none has."""
    by_rank = run_in("gloo", 2, max_difference_or_error, row.name)
    if not torch_in(row.torch):
        assert not any(by_rank), by_rank
    elif row.error:
        assert any(isinstance(found, str) and re.search(row.error, found) for found in by_rank), by_rank
    else:
        assert any(isinstance(found, float) and found > 0 for found in by_rank), by_rank


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row.name)
def test_sim_has_the_same_or_the_right_numbers_or_refuses(row: Upstream) -> None:
    """Never a wrong number that gloo does not have."""
    over_gloo = run_in("gloo", 2, max_difference_or_error, row.name)
    try:
        simulated = run_in("sim", 2, max_difference, row.name)
    except RanksFailed as failed:
        failure = str(failed)
    else:
        raised = any(isinstance(found, str) for found in over_gloo)
        assert raised or all(found in (0.0, wrong) for found, wrong in zip(simulated, over_gloo, strict=True))
        return
    assert re.search(row.error or "comes? out wrong over gloo", failure)
