"""DeepSpeed's engine, by the version that is installed: run by ``tox run -e trainers``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome, check_training
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.verdict import UserVerdict

deepspeed = pytest.importorskip("deepspeed")
VERSION = tuple(int(part) for part in deepspeed.__version__.split("+", maxsplit=1)[0].split("."))


def model() -> nn.Module:
    """Parameters that partitions cut anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def checked(stage: int, num_microbatches: int, limit: float) -> UserVerdict:
    """Two updates on two ranks."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return check_training(
        model=model,
        trainer=DeepSpeed(config={"zero_optimization": {"stage": stage}, "gradient_clipping": limit}),
        mesh={"dp": 2},
        batches=[[(draw(6, 3), draw(6, 2)) for _ in range(num_microbatches)] for _ in range(2)],
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        dtype=torch.float32,
        world="gloo",
    )


CASES: list[Any] = [(stage, number, limit) for stage in range(4) for number, limit in ((1, 0.0), (3, 0.0), (3, 0.1))]


@pytest.mark.parametrize(("stage", "num_microbatches", "limit"), CASES)
def test_zero_is_equivalent(stage: int, num_microbatches: int, limit: float) -> None:
    """But for ZeRO-2 with accumulation before 0.18.3 (DeepSpeed issue #7718), which keeps the last microbatch only."""
    verdict = checked(stage, num_microbatches, limit)
    if VERSION < (0, 18, 3) and stage == 2 and num_microbatches > 1:
        assert verdict.outcome is Outcome.DIVERGED
        assert verdict.cause == "the gradient is from microbatch 2, the last, only, weighted by its share"
    else:
        assert verdict.outcome is Outcome.EQUIVALENT, verdict
