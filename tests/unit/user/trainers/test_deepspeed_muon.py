"""DeepSpeed's Muon on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equivcheck import UsageError
from equivcheck.user.trainers.deepspeed_muon import DeepSpeedMuon, MuonGradients, newton_schulz

SETTINGS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.2}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 100))
def test_singular_vectors_stay_and_singular_values_come_near_one(rows: int, columns: int, seed: int) -> None:
    """Whether a matrix is tall or wide."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))
    values = torch.zeros(rows, columns, dtype=torch.float64)
    values.diagonal().copy_(torch.linspace(1, 3, min(rows, columns), dtype=torch.float64))
    found = left.mT @ newton_schulz(left @ values @ right) @ right.mT
    assert ((found.diagonal() > 0.5) & (found.diagonal() < 1.5)).all()
    found.diagonal().zero_()
    assert found.abs().max() < 1e-12


def test_other_parameters_are_updated_as_by_adamw() -> None:
    """Two updates of a vector."""
    ours, theirs = nn.Parameter(torch.tensor([1.0, -2.0]).double()), nn.Parameter(torch.tensor([1.0, -2.0]).double())
    optimizers = DeepSpeedMuon([ours], **SETTINGS), torch.optim.AdamW([theirs], **SETTINGS)
    for gradient in (torch.tensor([0.5, 0.1]).double(), torch.tensor([-0.3, 0.2]).double()):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)


def test_muon_updates_matrices_except_embeddings_and_heads() -> None:
    """By name. Without names, it updates all matrices."""
    matrices = [nn.Parameter(torch.eye(2)) for _ in range(3)]
    named = zip(("layers.0.weight", "embed_tokens.weight", "lm_head.weight"), matrices, strict=True)
    muon, adam = DeepSpeedMuon(named, muon_lr=0.5, adam_lr=0.25).param_groups
    assert ([each is matrices[0] for each in muon["params"]], muon["lr"]) == ([True], 0.5)
    assert (len(adam["params"]), adam["lr"]) == (2, 0.25)
    (group,) = DeepSpeedMuon(matrices).param_groups
    assert len(group["params"]) == 3


@pytest.mark.parametrize(
    ("size", "given", "words"),
    [
        ((2, 2), {"per_head_muon": True}, "it got per_head_muon, which it does not know. Expected adam_lr, "),
        ((2, 2), {"adam_w_mode": False}, "but it only decays weights as AdamW does. Expected adam_w_mode=True"),
        ((2, 2, 2), {}, "a parameter for Muon has more than two dims. Expected matrices"),
    ],
)
def test_bad_input_is_one_line(size: tuple[int, ...], given: dict[str, Any], words: str) -> None:
    """It names the argument."""
    with pytest.raises(UsageError) as raised:
        DeepSpeedMuon([nn.Parameter(torch.zeros(size))], **given)
    assert words in str(raised.value)


class ZeroWithUpdates:
    """Writes an update in place of a gradient, as ZeRO-1 does."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.all_grad_tensors = {0: [torch.ones_like(parameter)]}

    def get_flat_partition(self, tensor_list: list[torch.Tensor], param_group_idx: int) -> torch.Tensor:
        """Return the update."""
        return self.all_grad_tensors[param_group_idx][0].mul_(len(tensor_list) * 7)


def test_a_gradient_is_kept_before_an_update_takes_its_place() -> None:
    """Only if the parameter uses Muon."""
    for uses_muon in (True, False):
        parameter = nn.Parameter(torch.zeros(2, 2))
        parameter.use_muon = uses_muon  # type: ignore[attr-defined]
        zero = ZeroWithUpdates(parameter)
        gradients = MuonGradients(zero)
        zero.get_flat_partition([parameter], param_group_idx=0)
        kept = gradients.take()
        assert [value.unique().tolist() for value in kept.values()] == ([[1.0]] if uses_muon else [])
        assert gradients.take() == {}
