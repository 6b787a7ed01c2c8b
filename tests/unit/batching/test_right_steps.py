"""A right step agrees in all arrangements, far within tolerance."""

from __future__ import annotations

import pytest
import torch

from equivcheck import Outcome
from equivcheck.batching.check import check_batching
from unit.batching.right_steps import RIGHT

NORMALISERS = {
    "tokens, packed": "mean over the counted tokens of all microbatches",
    "sequences": "mean over the examples (each the mean over its tokens) of all microbatches",
    "sum": "sum over the counted tokens",
    "weighted rows": "its weight from the batch",
    "DPO": "mean over the examples of all microbatches",
    "completions": "mean over the labels before the shift of all microbatches",
}
"""Words from the verdict, by the step's name."""


def require_equivalent(name: str, dtype: torch.dtype, seed: int) -> None:
    """Check a step from the table."""
    model, step, batch, arguments = RIGHT[name]
    verdict = check_batching(model=model, step=step, batch=batch(), dtype=dtype, seed=seed, **arguments)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert verdict.worst_error < 0.7
    assert NORMALISERS.get(name, "") in verdict.normaliser


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_step_is_equivalent(name: str, dtype: torch.dtype) -> None:
    """The verdict names the normaliser if one fits."""
    require_equivalent(name, dtype, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_step_is_equivalent_with_other_weights(name: str, dtype: torch.dtype, seed: int) -> None:
    """With all seeds, more than 1,000 arrangements for each type."""
    require_equivalent(name, dtype, seed)
