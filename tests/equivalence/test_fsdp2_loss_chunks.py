"""`fully_shard` with a head that is called once for each chunk of positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from equivcheck import Outcome, Scenario, check
from equivcheck.export.script import can_export
from equivcheck.layouts.composition.limits import repair_layout
from equivcheck.scenario import (
    FSDP2,
    Adam,
    Attention,
    Axis,
    ClipNorm,
    CrossEntropy,
    Data,
    ElementType,
    GatedMLP,
    Head,
    Layout,
    Loss,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.setup import Setup

needs_chunks = pytest.mark.skipif(is_torch_in("<2.13"), reason="fully_shard accepts calls of one module in a unit since 2.13")
CHUNKED = FSDP2(wrapping=Wrapping.PER_LAYER, head_unit=True, loss_chunks=2)
MODEL = Model(
    features=4,
    length=5,
    source=Tokens(vocabulary=7),
    layers=(Attention(num_heads=2, num_kv_heads=2), GatedMLP(hidden=6)),
    head=Head(norm=Norm.RMS),
    offset=True,
)
TRAINING = Training(
    model=MODEL,
    data=Data(microbatches=(4, 8)),
    loss=CrossEntropy(z_loss=0.1),
    optimizer=Adam(),
    clipping=ClipNorm(max_norm=0.1),
    steps=2,
)


def scenario(fsdp: FSDP2, *sizes: int, **changes: Any) -> Scenario:
    """Two steps with two microbatches of tokens."""
    names = FSDP2.axes[len(sizes) - 1]
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    return Scenario(training=replace(TRAINING, **changes), layout=Layout(mesh=mesh, parallelisms=(fsdp,)))


@needs_chunks
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (1,), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("norm", [None, Norm.RMS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_chunks": 8},
        {"reshard_after_forward": False},
        {"reshard_after_backward": False},
        {"no_sync": True, "all_reduce_once": True},
        {"explicit_unshard": True, "embedding_unit": True},
    ],
    ids=str,
)
def test_a_head_in_chunks_trains_like_one_device(sizes: tuple[int, ...], norm: Norm | None, options: dict[str, Any]) -> None:
    """Chunks of unequal length, and more chunks than positions."""
    model = replace(MODEL, head=Head(norm=norm))
    check(scenario(replace(CHUNKED, **options), *sizes, model=model)).assert_equivalent()


@needs_chunks
@pytest.mark.parametrize("loss", [Loss.MSE_MEAN, Loss.LINEAR_MEAN, Loss.MSE_SUM])
def test_means_of_chunks_are_weighted_by_their_positions(loss: Loss) -> None:
    """Five positions form chunks of three and two."""
    check(scenario(CHUNKED, 2, loss=loss)).assert_equivalent()


@needs_chunks
def test_the_linear_of_the_head_is_called_for_each_chunk() -> None:
    """Five positions form two chunks in each of four microbatches on two ranks."""
    sizes: list[int] = []

    def count(setup: Setup) -> None:
        setup.model.get_submodule("head.linear").register_forward_pre_hook(
            lambda _module, inputs: sizes.append(inputs[0].shape[1])
        )

    check(scenario(CHUNKED, 2), alter=count).assert_equivalent()
    assert (sizes.count(3), sizes.count(2)) == (8, 8)


@needs_chunks
def test_a_chunk_left_out_is_found() -> None:
    """The first loss is too small."""

    def forget(setup: Setup) -> None:
        model: Any = setup.model
        inner = setup.loss
        setup.loss = lambda training, hidden, targets, divisor: inner(training, hidden[:, :3], targets[:, :3], divisor)
        assert model.defers_head

    assert check(scenario(CHUNKED, 2), alter=forget).outcome is Outcome.DIVERGED


@needs_chunks
def test_a_layout_in_lower_precision_has_no_chunks() -> None:
    """The model's output would be cast before the head."""
    layout = scenario(replace(CHUNKED, mixed_precision=MixedPrecision(param=ElementType.BFLOAT16)), 2).layout
    assert repair_layout(layout).of(FSDP2)[0].loss_chunks == 1


def test_a_head_in_chunks_is_not_exported() -> None:
    """Scripts compute the loss from all outputs."""
    assert not can_export(scenario(CHUNKED, 2))
    assert can_export(scenario(replace(CHUNKED, loss_chunks=1), 2))
