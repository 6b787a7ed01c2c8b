"""A wrong step differs, and its true cause is named."""

from __future__ import annotations

import pytest
import torch

from equivcheck import Outcome
from equivcheck.batching.check import check_batching
from unit.batching.reported_steps import REPORTED
from unit.batching.wrong_steps import FURTHER, WITHOUT_CAUSE

WRONG = REPORTED | FURTHER | WITHOUT_CAUSE


def test_all_reported_steps_are_listed() -> None:
    """Forty wrong variants were published for this check."""
    assert len(REPORTED) == 40


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_diverges_with_its_cause(name: str) -> None:
    """The cause is in the text, too. Without a proof there is none."""
    model, step, batch, arguments, cause = WRONG[name]
    verdict = check_batching(model=model, step=step, batch=batch(), **arguments)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert cause in verdict.cause
    assert bool(cause) == bool(verdict.cause)
    assert verdict.cause in " ".join(str(verdict).split())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_has_the_same_cause_with_other_weights(name: str, dtype: torch.dtype, seed: int) -> None:
    """In float32 rounding may hide a proof, but never makes another cause."""
    model, step, batch, arguments, cause = WRONG[name]
    verdict = check_batching(model=model, step=step, batch=batch(), dtype=dtype, seed=seed, **arguments)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert cause in verdict.cause or (dtype is torch.float32 and not verdict.cause)
