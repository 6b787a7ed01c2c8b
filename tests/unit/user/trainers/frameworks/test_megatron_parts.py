"""Parts of megatron-core's shards lie at the right places of full tensors. megatron-core is not needed."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from equivcheck.user.trainers.frameworks.megatron_parts import Placed

FULL = torch.arange(24.0).reshape(8, 3)
PLACES: dict[str, tuple[torch.Tensor, tuple[tuple[int, int], ...]]] = {
    "replicated": (FULL, ((0, 0),)),
    "rows of the second rank": (FULL[4:], ((4, 0),)),
    "columns of the second rank": (FULL[:, 1:], ((0, 1),)),
    "gate and value of the second rank": (torch.cat([FULL[2:4], FULL[6:]]), ((2, 0), (6, 0))),
    "a vector": (FULL.flatten()[6:12], ((6, 0),)),
}


def placed(place: str) -> tuple[Placed, torch.Tensor]:
    """A local shard, and its full tensor."""
    local, bands = PLACES[place]
    full = FULL.flatten() if local.ndim == 1 else FULL
    return Placed(name="weight", parameter=nn.Parameter(local.clone()), shape=tuple(full.shape), bands=bands), full


@pytest.mark.parametrize("place", PLACES)
@hypothesis.given(data=st.data())
def test_each_element_of_a_run_is_at_its_place(place: str, data: st.DataObject) -> None:
    """Optimizer shards begin and end anywhere in a local shard."""
    shard, full = placed(place)
    flat = shard.parameter.detach().flatten()
    start = data.draw(st.integers(0, len(flat) - 1))
    stop = data.draw(st.integers(start + 1, len(flat)))
    found = torch.full_like(full, -1.0)
    for part in shard.parts(flat[start:stop], start):
        index = tuple(slice(first, first + size) for first, size in zip(part.start, part.tensor.shape, strict=True))
        assert (found[index] == -1.0).all()
        found[index] = part.tensor
    is_found = found != -1.0
    assert torch.equal(found[is_found], full[is_found])
    assert sorted(found[is_found].tolist()) == sorted(flat[start:stop].tolist())


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_loads_its_elements(place: str) -> None:
    """It trains from the weights of the single-device model."""
    shard, full = placed(place)
    expected = shard.parameter.detach().clone()
    shard.parameter.data.fill_(-1.0)
    shard.load(full)
    assert torch.equal(shard.parameter, expected)
