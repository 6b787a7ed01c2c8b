"""Mistakes with forward passes that run again, and so change buffers again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks


def repeated_forwards(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: ranks run a module's forward several times for each run on one device.

    Two modules are tried: the outermost module that ranks call more often than one device does, and its parent.
    """
    repeated = diverged.repeated_module()
    if repeated is None:
        return
    name, times = repeated
    for owner in dict.fromkeys((name.rpartition(".")[0], name)):
        who = f"`{owner}`" if owner else "the model"
        words = (
            f"the forward of {who} runs {times} times for each call on one device, and changes buffers each time, as with "
            "activation checkpointing, which runs it again in backward"
        )
        yield Mistake(Cause.FORWARD_REPEATED, words, partial(_repeat, name=owner, times=times), is_quick=True)


def _repeat(ranks: EmulatedUserRanks, *, name: str, times: int) -> None:
    for model in ranks.models:
        module: Any = model.get_submodule(name)
        module.forward = partial(_forward_again, module.forward, times)


def _forward_again(forward: Callable[..., Any], times: int, *inputs: Any, **keywords: Any) -> Any:
    outputs = forward(*inputs, **keywords)
    with torch.no_grad():
        for _ in range(times - 1):
            forward(*inputs, **keywords)
    return outputs
