"""`fully_shard` with units for embedding and head."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.limits import repair_training
from equivcheck.scenario import (
    FSDP2,
    Adam,
    Attention,
    Axis,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    Layout,
    Mesh,
    Model,
    Norm,
    Tokens,
    Training,
    Wrapping,
)
from support.exported import run_script
from support.verdicts import require_predicted

LAYERS = FSDP2(wrapping=Wrapping.PER_LAYER)
UNITS = replace(LAYERS, embedding_unit=True, head_unit=True)
MODEL = Model(
    features=4,
    length=4,
    source=Tokens(vocabulary=7),
    layers=(Attention(num_heads=2, num_kv_heads=2), GatedMLP(hidden=6)),
    head=Head(norm=Norm.RMS),
)
TRAINING = Training(
    model=MODEL,
    data=Data(microbatches=(4, 8)),
    loss=CrossEntropy(),
    optimizer=Adam(),
    steps=2,
)


def scenario(fsdp: FSDP2, *sizes: int, model: Model = MODEL) -> Scenario:
    """Two steps with two microbatches of tokens."""
    names = FSDP2.axes[len(sizes) - 1]
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    return Scenario(training=replace(TRAINING, model=model), layout=Layout(mesh=mesh, parallelisms=(fsdp,)))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1,), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(
    "fsdp",
    [
        UNITS,
        replace(UNITS, reshard_after_forward=False, explicit_prefetch=True),
        replace(UNITS, reshard_after_backward=False, explicit_prefetch=True),
        replace(UNITS, explicit_unshard=True, no_sync=True),
        replace(UNITS, layers_per_unit=2, reshard_after_forward=False, reshard_after_backward=False),
        replace(LAYERS, embedding_unit=True, all_reduce_once=True),
        replace(LAYERS, head_unit=True),
    ],
    ids=["default", "not_resharded", "kept_after_backward", "gathered_first", "kept", "embedding", "head"],
)
def test_embedding_and_head_as_units_train_like_one_device(fsdp: FSDP2, sizes: tuple[int, ...]) -> None:
    """All calls are predicted, on axes of one rank too."""
    require_predicted(scenario(fsdp, *sizes))


@pytest.mark.parametrize("learned", [False, True], ids=["empty_root", "positions_in_root"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_root_has_what_is_left(*, learned: bool, frozen: bool) -> None:
    """With learned positions it is a unit, too."""
    model = replace(MODEL, source=Tokens(vocabulary=7, learned_positions=learned, frozen=frozen))
    require_predicted(scenario(UNITS, 2, model=model))
    require_predicted(scenario(replace(UNITS, ignore_frozen=True, reshard_to=2), 4, model=model))


def test_backward_does_not_gather_the_embedding() -> None:
    """Forward gathers the four units in each of four microbatches, backward only three."""
    calls = require_predicted(scenario(UNITS, 2)).calls[0]
    assert Counter(call.op for call in calls if call.op == "all_gather") == {"all_gather": 4 * (4 + 3)}


def test_embedding_and_head_with_one_weight_are_in_one_unit() -> None:
    """The nearest training gives the head its own weight."""
    tied = scenario(UNITS, 2, model=replace(MODEL, head=Head(tied=True)))
    assert check(tied).outcome is Outcome.UNSUPPORTED
    assert repair_training(tied.training, tied.layout).model.head == Head()


@pytest.mark.parametrize("head", [Head(), Head(norm=Norm.LAYER, bias=True)])
def test_the_exported_script_has_the_units(head: Head, tmp_path: Path) -> None:
    """Divide factors are set for them, too."""
    fsdp = replace(UNITS, gradient_divide_factor=1.0, sum_reductions=True)
    script, _ = run_script(scenario(fsdp, 2, model=replace(MODEL, head=head)), tmp_path)
    assert "model.embedding.set_unshard_in_backward(False)" in script
    assert "model.embedding.set_gradient_divide_factor(1.0)" in script
