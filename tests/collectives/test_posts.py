"""Messages, objects, barriers and coalesced calls, in sim and over gloo, against the NumPy model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import model
from collectives.cases import SIZES, Kind, groups, inputs_of
from collectives.judge import assert_received, same_bits
from collectives.post_programs import deliver, exchange_objects, meet, run_coalesced
from collectives.posts import COALESCED, Barrier, Coalesced, Form, Post, coalesced_batches, mails
from collectives.worlds import WORLDS, run_in

EXAMPLES = max(10, settings().max_examples // 10)

OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("form", Form)
def test_messages(form: Form) -> None:
    """Every message arrives bit for bit at its receiver; tags and order of issue tell messages apart."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(mails(form))
    def arrive(mail: tuple[int, tuple[Post, ...]]) -> None:
        size, sent = mail
        for world in WORLDS:
            by_rank = run_in(world, size, deliver, sent)
            for post, received in zip(sent, zip(*by_rank, strict=True), strict=True):
                assert_delivered(post, received)

    arrive()


def assert_delivered(post: Post, received: tuple[dict[int, Any], ...]) -> None:
    """`received` is by global rank."""
    for rank, letters in enumerate(received):
        mine = {i for i, case in enumerate(post.messages) if case.group[post.receivers[i]] == rank}
        assert set(letters) == mine, f"rank {rank} of {post}"
        for index, letter in letters.items():
            expected = inputs_of(post.messages[index], post.messages[index].root)[0]
            assert same_bits(letter, expected), f"message {index} of {post}: {letter} instead of {expected}"


@pytest.mark.parametrize("kind", COALESCED)
def test_coalesced(kind: Kind) -> None:
    """Calls behind one handle give what each gives alone."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(coalesced_batches(kind))
    def agree(batch: tuple[int, tuple[Coalesced, ...]]) -> None:
        size, calls = batch
        for world in WORLDS:
            by_rank = run_in(world, size, run_coalesced, calls)
            for call, results in zip(calls, zip(*by_rank, strict=True), strict=True):
                for case, parts in zip(call.cases, zip(*results, strict=True), strict=True):
                    assert_received(case, parts)

    agree()


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_objects(data: st.DataObject) -> None:
    """Objects, and the tensors in them, arrive equal."""
    size = data.draw(SIZES)
    ranks = data.draw(groups(size))
    objects = data.draw(st.lists(OBJECTS, min_size=len(ranks), max_size=len(ranks)))
    root = data.draw(st.integers(0, len(ranks) - 1))
    for world in WORLDS:
        for rank, found in enumerate(run_in(world, size, exchange_objects, ranks, root, objects)):
            assert (found is not None) == (rank in ranks)
            if found is not None:
                assert_exchanged(found, objects, ranks.index(rank), root)


def assert_exchanged(found: dict[str, Any], objects: list[Any], member: int, root: int) -> None:
    """What one member got is what the model says."""
    own = [(each, [float(index)] * index) for index, each in enumerate(objects)]
    assert listed(found["all_gathered"]) == model.all_gather(own)[member]
    assert listed(found["gathered"] or []) == model.gather(own, root)[member]
    assert listed(found["told"]) == [objects[root], "and", own[root]]
    assert found["scattered"] == model.scatter([objects] * len(objects), root)[member]
    assert found["passed"] == (objects[member - 1] if len(objects) > 1 else None)


def listed(found: list[Any]) -> list[Any]:
    """With the tensor of each pair as a list."""
    return [
        (each[0], each[1].tolist()) if isinstance(each, tuple) and isinstance(each[1], torch.Tensor) else each for each in found
    ]


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_barriers(world: str, data: st.DataObject) -> None:
    """Nobody leaves a barrier before everybody has come, however late."""
    size = data.draw(SIZES)
    ranks = data.draw(groups(size))
    delays = data.draw(st.lists(st.sampled_from((0.0, 0.002)), min_size=len(ranks), max_size=len(ranks)))
    times = np.array([found for found in run_in(world, size, meet, ranks, delays, data.draw(st.sampled_from(Barrier))) if found])
    assert len(times) == len(ranks)
    assert times[:, 0].max() <= times[:, 1].min()
