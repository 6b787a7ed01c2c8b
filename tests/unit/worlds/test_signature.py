"""Run signatures."""

from __future__ import annotations

from dataclasses import replace

from equivcheck import check
from equivcheck.scenario import DDP, FSDP2, SPMD, Data, Layer, Loss, Model, Parallelism, Training
from equivcheck.worlds.signature import AFTER
from unit.campaign import fakes

PLAIN = DDP()


def signature(parallelism: Parallelism = PLAIN, *, steps: int = 1, features: int = 2) -> frozenset[str]:
    """Signature for training one linear layer on two ranks."""
    plain = fakes.scenario()
    model = Model(features=features, layers=(Layer(width=2),))
    training = Training(model=model, data=Data(microbatches=(2,)), loss=Loss.LINEAR_MEAN, steps=steps)
    layout = replace(plain.layout, parallelisms=(parallelism,))
    return frozenset(check(replace(plain, training=training, layout=layout)).signature)


def calls(found: frozenset[str]) -> set[str]:
    """Transitions between calls."""
    return {each for each in found if AFTER in each}


def test_sizes_and_more_of_the_same_make_no_difference() -> None:
    """A larger layer or one more step communicates in the same way."""
    assert calls(signature(features=3)) == calls(signature())
    assert calls(signature(steps=4)) == calls(signature(steps=3))


def test_another_layout_does_something_else() -> None:
    """DDP issues consecutive reductions, while FSDP2 gathers first."""
    assert calls(signature(DDP())) != calls(signature(FSDP2()))
    assert any("all_gather" in each for each in calls(signature(FSDP2())))


def test_what_dtensor_works_out_is_part_of_it() -> None:
    """An operation with the placements of its arguments, whatever their sizes."""
    found = signature(SPMD(), features=5) - calls(signature(SPMD(), features=5))
    assert any(each.startswith("aten.addmm.default (Replicate(),) (Shard(dim=0),)") for each in found)
    assert not signature(DDP()) - calls(signature(DDP()))
