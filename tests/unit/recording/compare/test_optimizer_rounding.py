"""Small differences after an update by Muon are undecided, because it rounds to bfloat16 inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equivcheck
from equivcheck import Outcome, TraceVerdict
from equivcheck.recording.compare.optimizer_rounding import ABOUT_MUON

Optimizer = Callable[[Any], torch.optim.Optimizer]
RATE = 0.02


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Rounds inside."""
    return torch.optim.Muon(parameters, lr=RATE)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Does not."""
    return torch.optim.SGD(parameters, lr=RATE)


def recorded(folder: Path, optimizer: Optimizer, *, error: float = 0.0, moved: int = 0) -> Path:
    """A recorded training whose first update is wrong by a part of itself."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    own = optimizer(model.parameters())
    with equivcheck.record(folder, moved=moved):
        for step in range(2):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            own.zero_grad()
            model(inputs).square().mean().backward()
            before = model.weight.detach().clone()
            own.step()
            if step == 0:
                model.weight.data += error * (model.weight.detach() - before)
    return folder


def compared(folder: Path, optimizer: Optimizer, error: float) -> TraceVerdict:
    """With measured noise."""
    one, moved = recorded(folder / "one", optimizer), recorded(folder / "moved", optimizer, moved=1)
    return equivcheck.compare(one, recorded(folder / "other", optimizer, error=error), moved=[moved])


@pytest.mark.parametrize(
    ("optimizer", "error", "outcome"),
    [
        (muon, 0.0, Outcome.EQUIVALENT),
        (muon, 0.05, Outcome.INCONCLUSIVE),
        (muon, 0.5, Outcome.DIVERGED),
        (sgd, 0.05, Outcome.DIVERGED),
    ],
)
def test_small_errors_in_updates_of_muon_are_undecided(
    tmp_path: Path, optimizer: Optimizer, error: float, outcome: Outcome
) -> None:
    """Large ones are not, nor are those of another optimizer."""
    verdict = compared(tmp_path, optimizer, error)
    assert verdict.outcome is outcome, verdict
    assert (ABOUT_MUON in str(verdict).replace("\n         ", " ")) is (outcome is Outcome.INCONCLUSIVE)
