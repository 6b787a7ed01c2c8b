"""Runs emulated ranks under torch function modes, which change the functions that a model or a step calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.loop import default_step
from equivcheck.user.task import Loss

ModeFor = Callable[[nn.Module], TorchFunctionMode]
"""Function to get a new mode, from a rank's model."""


def enter_in_forward(ranks: EmulatedUserRanks, mode_for: ModeFor) -> None:
    """Change the emulated ranks' models, so that each forward runs under the torch function mode ``mode_for(model)``."""
    for model in ranks.models:
        module: Any = model
        module.forward = partial(_call_in, module, module.forward, mode_for)


def _call_in(
    model: nn.Module,
    forward: Callable[..., Any],
    mode_for: ModeFor,
    *inputs: Any,
    **keywords: Any,
) -> Any:
    with mode_for(model):
        return forward(*inputs, **keywords)


def enter_in_step(ranks: EmulatedUserRanks, mode_for: ModeFor) -> None:
    """Change the emulated ranks' step, so that it runs under the torch function mode ``mode_for(model)``."""
    own = ranks.task.step or default_step(ranks.task)

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Loss) -> Any:
        with mode_for(model):
            return own(model, batch, optimizer, loss)

    ranks.task = replace(ranks.task, step=step)
