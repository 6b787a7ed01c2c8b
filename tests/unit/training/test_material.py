"""Tests for initial parameters and data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equivcheck.scenario import AuxiliaryLinear, Data, Layer, Model, Norm, Precision, Training
from equivcheck.training.material import Material, material

TRAINING = Training(
    model=Model(
        features=3,
        layers=(Layer(width=4, dropout=0.25, norm=Norm.LAYER, auxiliary=AuxiliaryLinear.NEVER), Layer(width=2)),
    ),
    data=Data(microbatches=(64, 5)),
    steps=2,
    seed=7,
)


def every_tensor(drawn: Material) -> list[torch.Tensor]:
    """All tensors of a training."""
    batches = [batch for step in drawn.steps for batch in step]
    data = [tensor for batch in batches for tensor in (batch.inputs, batch.targets, *batch.masks) if tensor is not None]
    return [*drawn.parameters.values(), *data]


def test_material_is_kept() -> None:
    """Equal trainings share one object, because ranks and shrinking ask for it repeatedly."""
    assert material(TRAINING) is material(replace(TRAINING))


def test_material_is_determined_by_the_training() -> None:
    """Drawing again gives the same bits."""
    first, second = material(TRAINING), material.__wrapped__(TRAINING)
    assert first is not second
    assert all(torch.equal(*pair) for pair in zip(every_tensor(first), every_tensor(second), strict=True))


def test_seed_changes_everything_drawn() -> None:
    """Another seed changes parameters, inputs, targets and masks."""
    pairs = zip(every_tensor(material(TRAINING)), every_tensor(material(replace(TRAINING, seed=8))), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs)


def test_drawing_leaves_the_process_wide_generators_alone() -> None:
    """Torch's default generator is unchanged."""
    before = torch.get_rng_state()
    material.__wrapped__(TRAINING)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_step_has_data_of_its_own() -> None:
    """No step repeats another step's data, so that reusing a batch is noticed."""
    first, second = material(TRAINING).steps
    assert not torch.equal(first[0].inputs, second[0].inputs)
    assert not torch.equal(first[0].targets, second[0].targets)


def test_shapes_follow_the_nouns() -> None:
    """Each microbatch has its shapes; a layer without dropout has no mask."""
    for step in material(TRAINING).steps:
        for rows, batch in zip((64, 5), step, strict=True):
            assert batch.inputs.shape == (rows, 3)
            assert batch.targets.shape == (rows, 2)
            assert batch.masks[0] is not None
            assert batch.masks[0].shape == (rows, 4)
            assert batch.masks[1] is None


def test_masks_are_scaled() -> None:
    """A mask has the expected fraction of zeros, and 1 / (1 - p) elsewhere."""
    mask = material(TRAINING).steps[0][0].masks[0]
    assert mask is not None
    assert set(mask.unique().tolist()) == {0.0, 1.0 / 0.75}
    assert (mask == 0.0).double().mean().item() == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize("precision", Precision)
def test_element_type_is_the_precision(precision: Precision) -> None:
    """Parameters, data and masks have the training's dtype."""
    drawn = material(replace(TRAINING, precision=precision))
    assert {tensor.dtype for tensor in every_tensor(drawn)} == {getattr(torch, precision.value)}


def test_no_bias_and_no_norm_weight_is_trivial() -> None:
    """Biases are not zero and norm weights are not one, because otherwise adding or multiplying twice would not be noticed."""
    parameters = material(TRAINING).parameters
    assert parameters["layers.0.linear.bias"].abs().min() > 0.0
    assert parameters["layers.0.norm.bias"].abs().min() > 0.0
    assert (parameters["layers.0.norm.weight"] - 1.0).abs().min() > 0.0


def test_a_scale_is_not_trivial() -> None:
    """The scale has no dim and is neither zero nor one."""
    for seed in range(10):
        scale = material(replace(TRAINING, seed=seed, model=replace(TRAINING.model, scale=True))).parameters["scale"]
        assert scale.shape == ()
        assert 0.5 <= scale.item() <= 1.5
        assert scale.item() != 1.0


def test_rows_may_lie_along_the_other_dim() -> None:
    """Inputs and targets are transposed, with the same numbers, and the batch knows its rows."""
    plain, turned = (material(replace(TRAINING, data=replace(TRAINING.data, batch_dim=dim))).steps[0][1] for dim in (0, 1))
    assert (plain.rows, turned.rows) == (5, 5)
    assert torch.equal(plain.inputs.T, turned.inputs)
    assert torch.equal(plain.targets.T, turned.targets)
    assert plain.masks[0] is not None
    assert plain.masks[0].shape == (5, 4)
