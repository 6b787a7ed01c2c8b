"""Tests of packed documents on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equivcheck.scenario import Attention, CrossEntropy, Data, Head, IgnoredLabels, Model, Tokens, Training
from equivcheck.training.labels import IGNORED
from equivcheck.training.loop import single_device_setup
from equivcheck.training.material import material

ATTENTION = Attention(num_heads=2, num_kv_heads=1, head_dim=2, rotary=True)
PACKED = Model(
    features=4,
    length=7,
    document_length=3,
    source=Tokens(vocabulary=5, learned_positions=True),
    layers=(ATTENTION, replace(ATTENTION, causal=False)),
    head=Head(),
)


def outputs_of(training: Training, tokens: torch.Tensor) -> torch.Tensor:
    """Logits on one device."""
    found: torch.Tensor = single_device_setup(training).module(tokens, (None, None), 0)
    return found.detach()


@pytest.mark.parametrize("fused", [False, True])
def test_a_packed_document_has_the_outputs_of_the_document_alone(fused: bool) -> None:
    """Each document's logits are those of a sequence that contains only this document."""
    layers = tuple(layer.with_fields(fused=fused) for layer in PACKED.layers)
    training = Training(model=replace(PACKED, layers=layers), data=Data(microbatches=(2,)), loss=CrossEntropy())
    tokens = material(training).steps[0][0].inputs
    packed = outputs_of(training, tokens)

    for start in (0, 3, 6):
        alone = outputs_of(training, tokens[:, start : start + 3])
        torch.testing.assert_close(packed[:, start : start + 3], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("ignored", IgnoredLabels)
def test_labels_before_a_boundary_are_ignored(batch_dim: int, ignored: IgnoredLabels) -> None:
    """A boundary's label would be the next document's first token, so it counts in no row; the last label of a row may count."""
    data = Data(microbatches=(3, 2), batch_dim=batch_dim)
    training = Training(model=PACKED, data=data, loss=CrossEntropy(ignored=ignored))
    batches = material(training).steps[0]
    counted = 0

    for batch in batches:
        labels = batch.targets.transpose(0, batch_dim)
        assert (labels[:, [2, 5]] == IGNORED).all()
        counted += int((labels != IGNORED).sum())
    assert batches[0].divisor == counted
    assert ignored is not IgnoredLabels.NONE or counted == 25


@pytest.mark.parametrize("length", [3, 2])
def test_a_document_as_long_as_the_sequence_changes_nothing(length: int) -> None:
    """Sequences of one document have no boundary."""
    model = replace(PACKED, length=length)
    assert not model.packs_documents
    packed, plain = (
        Training(model=each, data=Data(microbatches=(2,)), loss=CrossEntropy())
        for each in (model, replace(model, document_length=None))
    )
    tokens = material(packed).steps[0][0].inputs

    assert torch.equal(material(packed).steps[0][0].targets, material(plain).steps[0][0].targets)
    assert torch.equal(outputs_of(packed, tokens), outputs_of(plain, tokens))
