"""Complex buffers, as in rotary embeddings, keep their imaginary parts and are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import Outcome, UsageError, check_training
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence
from unit.user.programs import brought, in_ddp

WIDTH = 4


class Rotary(nn.Module):
    """Rotates pairs of features by a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.tensor([0.3, 0.7])))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two layers with a rotation between them."""
        pairs = torch.view_as_complex(self.first(inputs).unflatten(-1, (-1, 2)))
        return self.head(torch.view_as_real(pairs * self.turns).flatten(-2))


def turned_back(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Rotate in the opposite direction on every rank."""
    model.turns = model.turns.conj().resolve_conj()
    return in_ddp(model, mesh)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow), None])
def test_ranks_that_turn_the_opposite_way_diverge(dtype: torch.dtype | None) -> None:
    """A wrong imaginary part shows in the first loss."""
    check_training(**brought(model=Rotary, dtype=dtype)).assert_equivalent()
    first = first_divergence(check_training(**brought(model=Rotary, parallelize=turned_back, dtype=dtype)))
    assert (first.step, first.phase) == (0, Phase.LOSS)


def test_complex_buffers_are_compared() -> None:
    """A buffer that differs only in its imaginary part is found."""

    def changed_at_the_end(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        if next(iter(optimizer.state.values()))["step"] == 3:
            model.module.turns.imag.mul_(1 + 1e-12)
        return value

    honest = check_training(**brought(model=Rotary))
    verdict = check_training(**brought(model=Rotary, rank_step=changed_at_the_end))
    assert honest.outcome is Outcome.EQUIVALENT
    assert verdict.divergence is not None
    assert (verdict.divergence.phase, verdict.divergence.tensor) == (Phase.BUFFER, "turns")


def test_complex_parameters_are_refused_before_they_are_converted() -> None:
    """A conversion to real numbers would lose the imaginary part."""
    with pytest.raises(UsageError, match=r"weight is complex\. Expected real parameters"):
        check_training(**brought(model=lambda: nn.Linear(4, 2, dtype=torch.complex64)))
