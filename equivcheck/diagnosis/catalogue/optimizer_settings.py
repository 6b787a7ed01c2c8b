"""Wrong weight decay: coupled, decoupled, or both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, Optimizer
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.oracle.verdict.cause import Cause


def wrong_decays(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield explicit weight decay, in addition to the optimizer or in its place."""
    if not any(numbers.get("weight_decay") for numbers in diverged.right_settings.values()):
        return
    for cause, words, coupled, extra in (
        (Cause.DECAY_COUPLED, "weight decay is coupled: added to the gradients, not subtracted from the parameters", True, False),
        (
            Cause.DECAY_COUPLED,
            "weight decay is decoupled: subtracted from the parameters, not added to the gradients",
            False,
            False,
        ),
        (Cause.DECAY_TWICE, "weight decay is applied twice: by the optimizer, and to the parameters before it", False, True),
        (Cause.DECAY_TWICE, "weight decay is applied twice: by the optimizer, and to the gradients before it", True, True),
    ):
        yield Mistake(cause, words, partial(_decay, coupled=coupled, extra=extra), is_quick=True)


def _decay(ranks: EmulatedRanks, *, coupled: bool, extra: bool) -> None:
    """Decay explicitly before each update, in addition to the optimizer (`extra`) or in its place."""
    decays: dict[int, list[float]] = {}

    def prepare(rank: int, optimizer: Optimizer) -> None:
        decays[rank] = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if not extra and "weight_decay" in group:
                group["weight_decay"] = 0.0

    def decay_all(rank: int, _step: int) -> None:
        for group, decay in zip(ranks.optimizers[rank].param_groups, decays[rank], strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _decay_one(parameter, decay, group, coupled=coupled)

    ranks.built.append(prepare)
    ranks.before_update.append(decay_all)


def _decay_one(parameter: torch.Tensor, decay: float, group: dict[str, Any], *, coupled: bool) -> None:
    if not coupled:
        parameter.data.mul_(1.0 - float(group["lr"]) * decay)
    else:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.add(parameter.data, alpha=-decay if group.get("maximize") else decay)
