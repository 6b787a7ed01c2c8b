"""Repairs of sequence models end for all layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.layouts.composition.limits import limit_reason, repair_training_for_resume
from equivcheck.scenario import FSDP2, SPMD, Attention, Data, Distribution, Head, Model, Parallelism, Tokens
from equivcheck.strategies import attentions
from unit.layouts.plain import PLAIN, layout_of

COLUMNS, PROPAGATED = FSDP2(shard_last_dim=True), SPMD(distribution=Distribution.FULLY_SHARD, redistribute_gradients=False)
LARGEST = Model(
    features=32,
    length=16,
    source=Tokens(vocabulary=64, padding=63, learned_positions=True),
    layers=(Attention(num_heads=8, num_kv_heads=8, head_dim=8, rotary=True),),
    head=Head(tied=True),
)


@given(layer=attentions(), ranks=st.integers(1, 8))
def test_heads_are_made_a_multiple(layer: Attention, ranks: int) -> None:
    """Heads times width become a multiple of the ranks in one repair that only adds heads."""
    once = layer.rounded_up(ranks)
    assert once.num_heads * once.head_dim % ranks == once.num_kv_heads * once.head_dim % ranks == 0
    assert once.num_heads >= layer.num_heads
    assert once.head_dim >= layer.head_dim
    assert once.rounded_up(ranks) == once


@pytest.mark.parametrize("one", [COLUMNS, PROPAGATED])
@pytest.mark.parametrize("other", [COLUMNS, PROPAGATED])
@pytest.mark.parametrize("ranks", [(4, 3), (4, 5), (4, 7), (5, 5)])
def test_the_largest_model_is_repaired_for_two_layouts(one: Parallelism, other: Parallelism, ranks: tuple[int, int]) -> None:
    """Repairs end even if the least common multiple of two rank counts exceeds most drawn sizes."""
    training = replace(PLAIN, model=LARGEST, data=Data(microbatches=(2,)))
    layouts = (layout_of(one, ranks[0]), layout_of(other, ranks[1]))
    nearest = repair_training_for_resume(training, *layouts)
    assert [limit_reason(nearest, layout) for layout in layouts] == [None, None]
