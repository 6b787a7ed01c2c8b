"""Shard orders are computed once for repeated placements, and verified as before."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from equivcheck.worlds.sim.dtensor.orders import cached_shard_orders

MESH: Any = None
pytestmark = pytest.mark.torch(">=2.10", "earlier versions have no orders of mesh dims")


def test_orders_are_those_of_torch() -> None:
    """Every pair of placements has torch's order, at the first and the second request."""
    each = (Shard(0), Shard(1), Replicate(), Partial())
    pairs = [(one, other) for one in each for other in each]
    expected = [DTensorSpec(MESH, pair).shard_order for pair in pairs]
    with cached_shard_orders():
        for _ in range(2):
            assert [DTensorSpec(MESH, pair).shard_order for pair in pairs] == expected


def test_a_wrong_order_is_refused_each_time() -> None:
    """Only a verified order is accepted, and afterwards torch has its own functions again."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    before = dict(vars(DTensorSpec))
    wrong = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1,)),)
    with cached_shard_orders():
        for _ in range(2):
            with pytest.raises(AssertionError):
                DTensorSpec(MESH, (Shard(0), Replicate()), shard_order=wrong)
    assert dict(vars(DTensorSpec)) == before
