"""Configurations of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck import Outcome, check_training
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.verdict import UserVerdict
from tools.trainers.rows import Framework, Row

VERSIONS = ("0.18.2", "0.18.3", "0.19.8")
LAST_ONLY = "the gradient is from microbatch 2, the last, only, weighted by its share"
SETTINGS = {"1 microbatch": (1, 0.0), "3 microbatches": (3, 0.0), "3 microbatches, clipping": (3, 0.1)}
"""Number of microbatches and clipping limit."""


def model() -> nn.Module:
    """Parameters that partitions cut anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batches(num_microbatches: int, rows: int = 6) -> list[Any]:
    """Two updates."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return [[(draw(rows, 3), draw(rows, 2)) for _ in range(num_microbatches)] for _ in range(2)]


def check_zero(
    stage: int, num_microbatches: int, limit: float, config: Mapping[str, Any] | None = None, **arguments: Any
) -> UserVerdict:
    """Two updates with a ZeRO stage on two ranks."""
    given: dict[str, Any] = {
        "model": model,
        "trainer": DeepSpeed(config={"zero_optimization": {"stage": stage}, "gradient_clipping": limit, **(config or {})}),
        "mesh": {"dp": 2},
        "batches": batches(num_microbatches),
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "dtype": torch.float32,
        "world": "gloo",
    }
    return check_training(**given | arguments)


def _zero(versions: Sequence[str]) -> Iterator[Row]:
    for version in versions:
        for stage in range(4):
            for name, (number, limit) in SETTINGS.items():
                is_wrong = version == "0.18.2" and stage == 2 and number > 1
                yield Row(
                    version=version,
                    configuration=f"ZeRO-{stage}, {name}",
                    check=partial(check_zero, stage, number, limit),
                    expected=Outcome.DIVERGED if is_wrong else Outcome.EQUIVALENT,
                    cause=LAST_ONLY if is_wrong else "",
                    report="#7718" if is_wrong else "",
                )


DEEPSPEED = Framework(
    name="DeepSpeed",
    versions={version: (f"deepspeed=={version}",) for version in VERSIONS},
    rows=(*_zero(VERSIONS),),
    environment={"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
)
