"""Activation checkpointing by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equivcheck.layouts.composition.program import recompute_layers
from equivcheck.scenario import Checkpointing, Data, Execution, Layer, Model, Training
from equivcheck.scenario.execution import KEPT_PRODUCTS
from equivcheck.training.loop import single_device_setup
from equivcheck.training.material import material

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=5, dropout=0.5), Layer(width=2), Layer(width=3, bias=False))),
    data=Data(microbatches=(4,)),
)


def _forwards(recompute: Checkpointing) -> tuple[list[int], list[torch.Tensor | None]]:
    """Number of forwards in each layer's linear during one forward and backward, and the gradients."""
    setup = single_device_setup(TRAINING)
    recompute_layers(setup.model, Execution(checkpointing=recompute))
    counts = [0] * 3

    def count(index: int) -> None:
        counts[index] += 1

    for index in range(3):
        setup.model.get_submodule(f"layers.{index}.linear").register_forward_pre_hook(lambda *_, index=index: count(index))
    batch = material(TRAINING).steps[0][0]
    setup.module(batch.inputs, batch.masks, 0).sum().backward()
    return counts, [parameter.grad for parameter in setup.model.parameters()]


@pytest.mark.parametrize(
    ("recompute", "counts"),
    [
        (Checkpointing.NONE, [1, 1, 1]),
        (Checkpointing.ODD_LAYERS, [1, 2, 1]),
        (Checkpointing.EVERY_LAYER, [2, 2, 2]),
        (Checkpointing.SELECTIVE, [2, 2, 2]),
        (Checkpointing.OFFLOAD, [1, 1, 1]),
    ],
)
def test_chosen_layers_run_twice_and_give_the_same_gradients(recompute: Checkpointing, counts: list[int]) -> None:
    """A layer that keeps no activations runs again in backward, and nothing else changes."""
    found, gradients = _forwards(recompute)
    _, expected = _forwards(Checkpointing.NONE)
    assert found == counts
    for gradient, plain in zip(gradients, expected, strict=True):
        assert gradient is not None
        assert plain is not None
        assert torch.equal(gradient, plain)


class _Products(TorchDispatchMode):
    """Count matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        self.count += func.name().partition("::")[2] in KEPT_PRODUCTS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [Checkpointing.EVERY_LAYER, Checkpointing.SELECTIVE])
def test_selective_checkpointing_keeps_matrix_products(recompute: Checkpointing) -> None:
    """Three layers have eight products. Full checkpointing computes one of them again, for the dropout behind it."""
    setup = single_device_setup(TRAINING)
    recompute_layers(setup.model, Execution(checkpointing=recompute))
    batch = material(TRAINING).steps[0][0]
    with _Products() as products:
        setup.module(batch.inputs, batch.masks, 0).sum().backward()
    assert products.count == (8 if recompute is Checkpointing.SELECTIVE else 9)


def test_offload_saves_tensors_of_layers_by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three layers enters the context once."""
    entered: list[int] = []

    class Counted(torch.autograd.graph.save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            entered.append(1)

    monkeypatch.setattr("equivcheck.training.layers.module.save_on_cpu", Counted)
    assert _forwards(Checkpointing.OFFLOAD)[0] == [1, 1, 1]
    assert len(entered) == 3
