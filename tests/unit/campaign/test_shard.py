"""Parts of a campaign draw scenarios of their own."""

from __future__ import annotations

import pytest

from equivcheck.campaign.shard import Shard, parse_shard
from equivcheck.errors import UsageError


def test_no_two_shards_have_a_seed_in_common() -> None:
    """Nor has a shard that of the whole campaign."""
    seeds = [parse_shard(f"{number}/64").seed(7) for number in range(1, 65)]
    assert len({7, *seeds}) == 65
    assert Shard().seed(7) == 7


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "1/2/3", "-1/2", ""])
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    """The text says what is allowed."""
    with pytest.raises(UsageError, match=r"^shard .* is not valid: .*\. Expected "):
        parse_shard(text)
