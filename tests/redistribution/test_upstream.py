"""What is wrong with redistributions shows with torch alone: a script each in the folder `upstream`."""

from __future__ import annotations

import pytest

from support.upstream import Upstream, assert_listed, assert_shows, assert_sim_agrees

PACKAGE = "redistribution.upstream"
UPSTREAM = (
    Upstream(name="average_has_the_gradient_of_a_sum"),
    Upstream(name="gather_along_flattened_columns", ranks=4, torch=">=2.11"),
    Upstream(name="gather_of_uneven_parts_along_a_flattened_axis", ranks=4, torch=">=2.11"),
    Upstream(name="gather_on_descending_ranks"),
    Upstream(name="pending_gradient_of_a_mean", torch=">=2.11", error="from one partial type"),
    Upstream(name="scatter_of_uneven_strided_parts", error="AssertionError"),
    Upstream(
        name="view_stride_of_a_dim_cut_twice",
        ranks=4,
        torch=">=2.10",
        error="is unable to be interpreted|Expected cond to be True|AssertionError",
    ),
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
