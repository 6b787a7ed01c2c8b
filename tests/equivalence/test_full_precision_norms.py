"""`fully_shard` with mixed precision that leaves the weights of norms in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.limits import repair_layout, repair_training, why_unsupported
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.layouts.parallelisms.fsdp2 import apply
from equivcheck.oracle.reference.rounded import MixedPrecisionModel, rounded_setup
from equivcheck.scenario import (
    FSDP2,
    AdamW,
    Attention,
    Axis,
    CrossEntropy,
    Data,
    ElementType,
    GatedMLP,
    Head,
    Layout,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    Precision,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.system.torch_version import is_torch_in
from support.verdicts import require_predicted

needs_override = pytest.mark.skipif(is_torch_in("<2.15"), reason="torch has no param_dtype_override_fn")
BFLOAT16 = MixedPrecision(param=ElementType.BFLOAT16)
KEPT = FSDP2(wrapping=Wrapping.PER_LAYER, mixed_precision=BFLOAT16, full_precision_norms=True)
MODEL = Model(
    features=4,
    length=5,
    source=Tokens(vocabulary=7),
    layers=(Attention(num_heads=2, num_kv_heads=2, norm=Norm.RMS), GatedMLP(hidden=6, norm=Norm.LAYER)),
    head=Head(norm=Norm.RMS),
)
TRAINING = Training(
    model=MODEL,
    data=Data(microbatches=(4, 8)),
    loss=CrossEntropy(),
    optimizer=AdamW(),
    precision=Precision.FLOAT32,
    steps=2,
)


def scenario(fsdp: FSDP2) -> Scenario:
    """Two steps with two microbatches of tokens, on two ranks."""
    return Scenario(training=TRAINING, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(fsdp,)))


@needs_override
@pytest.mark.parametrize("reduce", [None, ElementType.FLOAT32, ElementType.BFLOAT16], ids=str)
@pytest.mark.parametrize("wrapping", Wrapping)
@pytest.mark.parametrize("no_sync", [False, True])
def test_norms_in_full_precision_equal_one_device(reduce: ElementType | None, wrapping: Wrapping, no_sync: bool) -> None:
    """One device leaves the same weights in float32, and the bytes of gathers in two dtypes are predicted."""
    policy = replace(BFLOAT16, reduce=reduce)
    require_predicted(scenario(replace(KEPT, wrapping=wrapping, mixed_precision=policy, no_sync=no_sync)))


@needs_override
def test_norms_that_are_cast_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose policy lacks the override differ from one device."""
    honest = apply._policy
    monkeypatch.setattr(
        apply, "_policy", lambda fsdp, *given, **options: honest(replace(fsdp, full_precision_norms=False), *given, **options)
    )
    assert check(scenario(KEPT)).outcome is Outcome.DIVERGED


def test_one_device_casts_all_but_norms() -> None:
    """The reference casts by parameter."""
    found = scenario(KEPT)
    rounding = rounding_of(found.layout, Precision.FLOAT32)
    assert rounding is not None
    (model,) = rounded_setup(TRAINING, rounding).parts
    assert isinstance(model, MixedPrecisionModel)
    kept = {name for name, parameter in model.cast.items() if parameter.dtype is torch.float32}
    assert kept == {"layers.0.norm.weight", "layers.1.norm.weight", "layers.1.norm.bias", "head.norm.weight"}


@pytest.mark.parametrize(
    "policy", [None, MixedPrecision(reduce=ElementType.BFLOAT16), MixedPrecision(param=ElementType.FLOAT64)], ids=str
)
def test_only_norms_beside_lower_precision_are_kept(policy: MixedPrecision | None) -> None:
    """Without a cast to lower precision, and before torch 2.15, the option goes."""
    layout = scenario(replace(KEPT, mixed_precision=policy)).layout
    (repaired,) = repair_layout(layout).of(FSDP2)
    assert not repaired.full_precision_norms
    assert repaired.mixed_precision == policy


@needs_override
def test_norms_are_kept_in_float32_only() -> None:
    """The repair of a float64 training is the same training in float32."""
    found = scenario(KEPT)
    wide = replace(found, training=replace(TRAINING, precision=Precision.FLOAT64))
    assert "norms in full precision" in (why_unsupported(wide) or "")
    assert repair_training(wide.training, wide.layout) == TRAINING
