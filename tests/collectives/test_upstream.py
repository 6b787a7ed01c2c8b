"""What is wrong with differentiable collectives shows with torch alone: a script each in the folder `upstream`."""

from __future__ import annotations

import pytest

from support.upstream import Upstream, assert_listed, assert_shows, assert_sim_agrees

PACKAGE = "collectives.upstream"
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
    Upstream(name="waited_coalesced_reduce_scatter", error="modified inplace"),
    Upstream(name="waited_reduce_scatter", torch="<2.11"),
    Upstream(name="waited_view_of_a_gather", torch=">=2.12"),
)


def test_each_script_is_in_the_table() -> None:
    """Under its name, which is in its command as well."""
    assert_listed(PACKAGE, UPSTREAM)


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row.name)
def test_it_shows_where_the_table_says(row: Upstream) -> None:
    """Over gloo some rank has another number than it should, or an error; in versions without the problem none has."""
    assert_shows(PACKAGE, row)


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row.name)
def test_sim_has_the_same_or_the_right_numbers_or_refuses(row: Upstream) -> None:
    """Never a wrong number that gloo does not have."""
    assert_sim_agrees(PACKAGE, row)
